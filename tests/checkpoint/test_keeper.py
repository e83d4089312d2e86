"""Saving beside the training: the moment of the call is saved, a failure is said, the right ones are kept."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest
import torch

from echelon.checkpoint import Keeper, read, write
from echelon.checkpoint import folder as module
from echelon.checkpoint.folder import path_of
from echelon.errors import CheckpointCorrupt, ConfigError, StorageFailed, Timeout
from echelon.state import State


def make_state(step, fill=None):
    return State(
        step=step,
        tensors={"w": torch.full((100,), float(step if fill is None else fill)), "n": torch.tensor(step)},
        values={"step": step},
    )


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


def no_report(message):
    pytest.fail(message)


def damage(path, name="state.safetensors"):
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)


class Gate:
    """Holds writes back until it is opened, so that a test decides what is in flight."""

    def __init__(self, monkeypatch):
        self.entered, self.opened = threading.Semaphore(0), threading.Event()
        real = module.write_snapshot

        def held(folder, taken):
            self.entered.release()
            assert self.opened.wait(60)
            return real(folder, taken)

        monkeypatch.setattr(module, "write_snapshot", held)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_what_is_saved_is_the_moment_of_the_call(tmp_path, gate):
    keeper = Keeper(tmp_path)
    tied = torch.zeros(50).t()
    state = State(
        step=1,
        tensors={"w": torch.zeros(3, 4).t(), "a": tied, "b": tied},
        values={"list": [1], "inside": torch.zeros(2)},
    )
    keeper.save(state)
    assert gate.entered.acquire(timeout=60)
    for tensor in state.tensors.values():
        tensor.fill_(9)
    state.values["list"].append(2)
    state.values["inside"].fill_(9)
    gate.opened.set()
    keeper.close()
    back = read(path_of(tmp_path, 1))
    assert all(not tensor.any() for tensor in back.tensors.values())
    assert back.tensors.keys() == {"w", "a", "b"}
    assert back.values["list"] == [1]
    assert not back.values["inside"].any()


def test_saving_returns_while_the_disk_is_busy_and_tells_when_it_is_done(tmp_path, gate):
    keeper = Keeper(tmp_path)
    keeper.save(make_state(1))
    assert gate.entered.acquire(timeout=60)
    assert keeper.finished() == []
    assert keeper.steps() == []
    gate.opened.set()
    keeper.wait()
    (written,) = keeper.finished()
    assert (written.step, written.path) == (1, path_of(tmp_path, 1))
    assert keeper.finished() == []


def test_a_second_save_waits_for_the_first_but_not_for_ever(tmp_path, gate):
    keeper = Keeper(tmp_path, timeout_s=0.05)
    keeper.save(make_state(1))
    with pytest.raises(Timeout):
        keeper.save(make_state(2))
    with pytest.raises(Timeout):
        keeper.wait()
    with pytest.raises(Timeout):
        keeper.save_now(make_state(2))
    gate.opened.set()
    patient = Keeper(tmp_path)
    keeper._timeout_s = 60
    keeper.wait()
    assert patient.latest(no_report).step == 1


def test_the_copy_in_flight_is_not_the_one_being_filled(tmp_path, gate):
    keeper = Keeper(tmp_path, keep=9)
    keeper.save(make_state(1))
    assert gate.entered.acquire(timeout=60)
    second = threading.Thread(target=keeper.save, args=(make_state(2),))
    second.start()
    second.join(0.2)  # by now the copy is made, were it into the wrong buffers
    gate.opened.set()
    second.join(60)
    keeper.save(make_state(3))
    keeper.close()
    for step in (1, 2, 3):
        assert torch.equal(read(path_of(tmp_path, step)).tensors["w"], torch.full((100,), float(step)))


def test_host_memory_is_taken_once(tmp_path, monkeypatch):
    taken = []
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: taken.append(1) or real(*a, **k))
    keeper = Keeper(tmp_path)
    for step in range(1, 5):
        keeper.save(make_state(step))
        keeper.wait()
    assert len(taken) == 2
    grown = make_state(5)
    grown.tensors["w"] = torch.full((200,), 5.0)
    keeper.save(grown)
    keeper.wait()
    assert len(taken) == 3
    assert torch.equal(keeper.latest(no_report).tensors["w"], grown.tensors["w"])


@pytest.mark.parametrize("after", ["save", "save_now", "wait", "close", "latest"])
def test_a_failed_write_is_raised_by_the_next_call_and_only_once(after, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    keeper = Keeper(tmp_path / "checkpoints")
    keeper.save(make_state(1))
    keeper._writer.join(60)
    calls = {
        "save": lambda: keeper.save(make_state(2)),
        "save_now": lambda: keeper.save_now(make_state(2)),
        "wait": keeper.wait,
        "close": keeper.close,
        "latest": lambda: keeper.latest(no_report),
    }
    with pytest.raises(StorageFailed):
        calls[after]()
    (tmp_path / "checkpoints").unlink()
    keeper.wait()
    keeper.save(make_state(3))
    keeper.close()
    assert keeper.latest(no_report).step == 3


def test_what_cannot_be_saved_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError):
        Keeper(tmp_path).save(State(step=1, values={"f": print}))
    with pytest.raises(ConfigError):
        Keeper(tmp_path).save(State(step=1, tensors={"f": torch.zeros(1, dtype=torch.complex128)}))


def test_the_last_few_are_kept(tmp_path):
    keeper = Keeper(tmp_path, keep=3)
    for step in range(10, 70, 10):
        keeper.save(make_state(step))
    keeper.close()
    assert keeper.steps() == [40, 50, 60]
    assert names_in(tmp_path) == ["step-00000040", "step-00000050", "step-00000060"]
    assert [written.step for written in keeper.finished()] == [10, 20, 30, 40, 50, 60]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        Keeper(tmp_path, keep=0)


@pytest.mark.parametrize("fresh", [True, False])
def test_corrupt_ones_do_not_count_among_those_kept(fresh, tmp_path):
    keeper = Keeper(tmp_path, keep=2)
    for step in (1, 2):
        keeper.save_now(make_state(step))
    (path_of(tmp_path, 2) / "values.json").unlink()
    if fresh:  # as after a resume: damage that only the hash shows is found, too
        keeper.save_now(make_state(2))
        damage(path_of(tmp_path, 2))
        keeper = Keeper(tmp_path, keep=2)
    keeper.save_now(make_state(3))
    assert keeper.steps() == [1, 2, 3]
    keeper.save_now(make_state(4))
    assert keeper.steps() == [3, 4]


def test_nothing_is_removed_when_the_new_one_could_not_be_written(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path, keep=1)
    keeper.save_now(make_state(1))

    def fail(*args):
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageFailed):
            keeper.save_now(make_state(2))
    assert keeper.latest(no_report).step == 1


def test_later_ones_of_another_run_never_cost_the_one_just_written(tmp_path):
    for step in (100, 200, 300):
        write(tmp_path, make_state(step))
    keeper = Keeper(tmp_path, keep=2)
    for step in (10, 20, 30):
        keeper.save_now(make_state(step))
    assert keeper.steps() == [20, 30, 100, 200, 300]


def test_the_latest_of_nothing_is_none(tmp_path):
    assert Keeper(tmp_path / "none").latest(no_report) is None
    assert Keeper(tmp_path).latest(no_report) is None
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_one_is_reported_and_the_one_before_it_used(tmp_path):
    keeper = Keeper(tmp_path)
    for step in (1, 2, 3):
        keeper.save_now(make_state(step))
    damage(path_of(tmp_path, 3))
    damage(path_of(tmp_path, 2), "manifest.json")
    reports: list[str] = []
    state = keeper.latest(reports.append)
    assert state.step == 1
    assert [("step 3" in reports[0]), ("step 2" in reports[1])] == [True, True]
    assert len(reports) == 2


def test_if_all_are_corrupt_none_is_loaded(tmp_path):
    keeper = Keeper(tmp_path)
    for step in (1, 2):
        keeper.save_now(make_state(step))
        damage(path_of(tmp_path, step))
    reports: list[str] = []
    with pytest.raises(CheckpointCorrupt, match="none of the 2 checkpoints"):
        keeper.latest(reports.append)
    assert len(reports) == 2


def test_a_corrupt_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    keeper = Keeper(tmp_path)
    keeper.save_now(make_state(1))
    keeper.save_now(make_state(2))
    damage(path_of(tmp_path, 2))
    keeper = Keeper(tmp_path)
    keeper.latest(lambda message: None)
    keeper.save(make_state(2, fill=7))
    keeper.close()
    assert torch.equal(keeper.latest(no_report).tensors["w"], torch.full((100,), 7.0))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB, where this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def make_large(step, size_bytes):
    return State(step=step, tensors={"w": torch.full((size_bytes // 4,), float(step))})


def test_a_full_disk_is_a_storage_failure_and_the_old_one_stays(small_disk):
    keeper = Keeper(small_disk / "checkpoints", keep=1)
    keeper.save_now(make_large(1, 400_000))
    keeper.save(make_large(2, 800_000))
    with pytest.raises(StorageFailed, match="No space left on device; free some space") as failed:
        keeper.wait()
    assert failed.value.exit_code == 77
    assert names_in(small_disk / "checkpoints") == ["step-00000001"]
    assert keeper.latest(no_report).step == 1
    keeper.save(make_large(3, 400_000))
    keeper.close()
    assert keeper.steps() == [3]


def test_a_read_only_disk_is_a_storage_failure_but_can_be_resumed_from(small_disk):
    Keeper(small_disk).save_now(make_state(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    keeper = Keeper(small_disk)
    keeper.save(make_state(2))
    with pytest.raises(StorageFailed, match="choose a folder"):
        keeper.close()
    assert keeper.latest(no_report).step == 1


def test_a_folder_without_permission_is_a_storage_failure(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StorageFailed, match="Permission denied; choose a folder"):
        Keeper(tmp_path / "run").save_now(make_state(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_saved_as_they_were_at_the_call(tmp_path):
    keeper = Keeper(tmp_path)
    weight = torch.randn(1000, 1000, device="cuda")
    expected = weight.cpu()
    keeper.save(State(step=1, tensors={"w": weight, "t": weight.t()}))
    weight.zero_()
    keeper.close()
    back = keeper.latest(no_report)
    assert torch.equal(back.tensors["w"], expected)
    assert torch.equal(back.tensors["t"], expected.t())
