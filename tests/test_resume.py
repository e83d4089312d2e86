"""Checkpoints of a run: when they are written, what they replace, and to whom they belong."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch

from echelon.checkpoint import folder
from echelon.comm import Group
from echelon.errors import ConfigError, Diverged, StorageFailed
from echelon.resume import Checkpoints, check_identity, identity, without_value
from echelon.state import State
from equivalence.jobs import Images, job

PATIENCE_S = 30.0


class Agreement:
    """A committed state that the test sets."""

    def __init__(self, step: int, value: float = 1.0) -> None:
        self.step, self.value = step, value
        self.restored: State | None = None

    def export(self) -> State:
        return State(step=self.step, tensors={"model/w": torch.tensor([self.value])}, values={})

    def restore(self, state: State) -> None:
        self.restored = state


class Watching(Group):
    """Notes which checkpoints there are whenever the workers wait for each other."""

    def __init__(self, folder) -> None:
        super().__init__(None, torch.device("cpu"))
        self.folder = folder
        self.seen: list[list[str]] = []

    def gather(self, value, during):
        self.seen.append(sorted(path.name for path in self.folder.glob("checkpoints/step-*")))
        return super().gather(value, during)


@pytest.fixture
def make(tmp_path):
    def make(agreement, tell=lambda _: None):
        group = Watching(tmp_path)
        mine = identity(job(data=Images()), 131, True, "data")
        return Checkpoints(tmp_path, "runs/a", mine, 3, group, agreement, tell=tell), group

    return make


def test_all_wait_until_what_was_committed_is_on_disk_before_anybody_reports_a_divergence(make):
    told = []
    checkpoints, group = make(Agreement(4), told.append)
    checkpoints.save_before_failing(0.5)
    assert [record["event"] for record in told] == ["saving", "checkpoint"]
    assert group.seen == [["step-00000004"]]


def test_weights_that_are_nan_are_not_saved_before_a_failure_and_a_warning_says_so(make):
    told = []
    checkpoints, group = make(Agreement(4, math.nan), told.append)
    checkpoints.save_before_failing(0.5)
    (record,) = told
    assert record["event"] == "warning"
    assert "w is NaN" in record["message"]
    assert group.seen == [[]]


def test_weights_that_are_nan_are_a_divergence_when_they_are_to_be_saved(make):
    checkpoints, _ = make(Agreement(4, math.nan))
    with pytest.raises(Diverged, match="w is NaN and was not saved"):
        checkpoints.save(0.5)


@pytest.mark.parametrize("value", [1.0, math.inf, -math.inf])
def test_only_nan_is_no_value(value):
    state = State(step=1, tensors={"model/w": torch.tensor([value]), "optimizer/w/x": torch.tensor([math.nan])})
    assert without_value(state) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_every_type_of_weight_can_be_looked_at(dtype):
    assert without_value(State(step=1, tensors={"model/w": torch.zeros(2).to(dtype)})) is None


def test_a_state_that_is_on_disk_is_not_written_twice(make):
    told = []
    checkpoints, _ = make(Agreement(4), told.append)
    checkpoints.save(0.5)
    checkpoints.save(0.5)
    assert [record["event"] for record in told] == ["saving", "checkpoint"]


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes nothing until it is let."""
    write = folder.write_snapshot
    let = threading.Event()

    def slow(*arguments):
        assert let.wait(PATIENCE_S)
        return write(*arguments)

    monkeypatch.setattr(folder, "write_snapshot", slow)
    yield let
    let.set()


def test_a_checkpoint_is_told_of_only_when_it_is_on_the_disk(make, disk, tmp_path):
    told = []
    checkpoints, _ = make(Agreement(4), told.append)
    checkpoints.save(0.5, wait=False)
    checkpoints.tell_finished()
    assert [(record["event"], record["step"]) for record in told] == [("saving", 4)]
    disk.set()
    end = time.monotonic() + PATIENCE_S
    while len(told) < 2 and time.monotonic() < end:
        checkpoints.tell_finished()  # as after every step
    assert (told[1]["event"], told[1]["step"]) == ("checkpoint", 4)
    assert told[1]["path"] == "runs/a/checkpoints/step-00000004"
    assert (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").exists()
    assert told[1]["seconds"] > told[1]["paused_seconds"] > 0  # it was written while training went on


def test_the_last_checkpoint_is_told_of_at_the_end(make, disk):
    told = []
    checkpoints, _ = make(Agreement(4), told.append)
    checkpoints.save(0.5, wait=False)
    disk.set()
    checkpoints.close()
    assert [record["event"] for record in told] == ["saving", "checkpoint"]


def test_a_checkpoint_that_could_not_be_written_is_never_told_of(make, monkeypatch):
    def full(*_):
        raise StorageFailed("runs/a", "No space left on device")

    monkeypatch.setattr(folder, "write_snapshot", full)
    told = []
    checkpoints, _ = make(Agreement(4), told.append)
    checkpoints.save(0.5, wait=False)
    with pytest.raises(StorageFailed):
        checkpoints.close()
    assert [record["event"] for record in told] == ["saving"]


def test_a_run_goes_on_from_its_newest_state_with_its_last_loss(make):
    agreement = Agreement(4, 2.5)
    make(agreement)[0].save(0.5)
    agreement.step = 6
    make(agreement)[0].save(0.25)
    resumed = make(agreement)[0].resume()
    assert (resumed.step, resumed.loss, resumed.messages) == (6, 0.25, ())
    assert agreement.restored.step == 6
    assert agreement.restored.tensors["model/w"].tolist() == [2.5]


def test_nothing_to_resume_is_said(make):
    resumed = make(Agreement(0))[0].resume()
    assert (resumed.step, resumed.loss) == (0, None)
    assert "nothing to resume" in resumed.messages[0]


@pytest.mark.parametrize(
    ("changes", "size", "term"),
    [({"seed": 1}, 131, "seed"), ({"batch": 49}, 131, "batch"), ({"slices": 6}, 131, "slices"), ({}, 132, "dataset")],
)
def test_what_the_data_position_hangs_on_must_be_the_same(changes, size, term):
    state = State(step=3, values=identity(job(data=Images()), 131, True, "data"))
    check_identity(state, identity(job(data=Images(), steps=99, clip=None), 131, False, "data"))
    with pytest.raises(ConfigError) as caught:
        check_identity(state, identity(job(data=Images(), **changes), size, True, "data"))
    assert caught.value.term == term


def test_other_samples_are_warned_of_and_gone_on_with():
    mine = identity(job(data=Images()), 131, True, "data")
    assert check_identity(State(step=3, values=mine), mine) == []
    (message,) = check_identity(State(step=3, values=mine), {**mine, "data": "other"})
    assert "as many samples" in message


def test_a_checkpoint_that_does_not_know_its_data_is_gone_on_from():
    mine = identity(job(data=Images()), 131, True, "data")
    old = {name: value for name, value in mine.items() if name != "data"}
    assert check_identity(State(step=3, values=old), mine) == []
