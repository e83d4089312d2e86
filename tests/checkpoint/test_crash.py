"""A crash at any system call, of the process or of the power, leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import Keeper, read, verify, write
from echelon.checkpoint import folder as module
from echelon.errors import StorageFailed
from echelon.state import State

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "remove")


def make_state(step, fill):
    # Together larger than the batch that is gathered before a write, so that there are several writes; each small
    # enough that torch fills it on one thread.
    tensors = {name: torch.full((30_000,), float(fill), dtype=torch.float64) for name in ("w", "x")}
    return State(step=step, tensors=tensors, values={"fill": fill})


class PowerOffError(BaseException):
    """Not an Exception: a crash runs no handler."""


class Machine:
    """Counts the system calls that change the disk, and dies before number `last`; a write dies halfway.

    `lost` says what a power failure takes with it that was not flushed: "nothing" (only the process died), "data",
    "entries" (also names of files), "renames" (also renames).
    """

    def __init__(self, last: int, lost: str):
        self.last, self.lost = last, lost
        self.trace: list[str] = []
        self.real = {name: getattr(os, name) for name in CALLS} | {"exchange": module.exchange}
        self.unflushed: set[int] = set()
        self.entries: list[tuple[int, Path]] = []
        self.renames: list[tuple[str, Path, Path]] = []

    def call(self, name, *args, **kwargs):
        if len(self.trace) >= self.last:
            if name == "write" and len(self.trace) == self.last:
                self.unflushed.add(os.fstat(args[0]).st_ino)
                self.real["write"](args[0], args[1][: len(args[1]) // 2])
            raise PowerOffError
        result = self.real[name](*args, **kwargs)
        self.trace.append(name)
        self.note(name, args, result)
        return result

    def note(self, name, args, result):
        if name == "open" and args[1] & os.O_CREAT:
            self.entries.append((Path(args[0]).parent.stat().st_ino, Path(args[0])))
        elif name == "write":
            self.unflushed.add(os.fstat(args[0]).st_ino)
        elif name == "fsync":
            number = os.fstat(args[0]).st_ino
            self.unflushed.discard(number)
            self.entries = [entry for entry in self.entries if entry[0] != number]
            self.renames = [rename for rename in self.renames if rename[1].parent.stat().st_ino != number]
        elif name in ("rename", "replace") or (name == "exchange" and result):
            self.renames.append((name, Path(args[0]), Path(args[1])))

    def lose(self, folder: Path):
        """What the disk holds when the machine is started again."""
        if self.lost == "nothing":
            return
        numbers = {number for number, _ in self.entries}
        names = {path.name for _, path in self.entries}
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if path.stat().st_ino in self.unflushed:
                os.truncate(path, path.stat().st_size // 2)
            if self.lost != "data" and path.parent.stat().st_ino in numbers and path.name in names:
                path.unlink()
        if self.lost == "renames":
            for name, one, other in reversed(self.renames):
                if name == "exchange":
                    self.real["exchange"](one, other)
                elif other.exists():
                    other.rename(one)

    @contextmanager
    def running(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, lambda *a, _name=name, **k: self.call(_name, *a, **k))
            patch.setattr(module, "exchange", lambda *a: self.call("exchange", *a))
            try:
                yield
                self.died = False
            except PowerOffError:
                self.died = True


def nothing_there(folder):
    return None


def one_before(folder):
    write(folder, make_state(1, 1))
    return 1


def same_step(folder):
    write(folder, make_state(2, 1))
    return 1


def three_before(folder):
    for step in (0, 1):
        write(folder, make_state(step, 1))
    (folder / ".step-00000009.writing").mkdir()
    return 1


def caught_between_renames(folder):
    write(folder, make_state(2, 1))
    (folder / "step-00000002").rename(folder / ".step-00000002.replaced")
    return 1


STARTS = [nothing_there, one_before, same_step, three_before, caught_between_renames]


def newest(folder):
    reports: list[str] = []
    state = Keeper(folder).latest(reports.append)
    assert reports == []
    if state is None:
        return None
    expected = make_state(state.step, state.values["fill"])
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in state.tensors.items())
    return state.values["fill"]


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "renames"])
@pytest.mark.parametrize("lost", ["nothing", "data", "entries", "renames"])
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_after_a_crash_anywhere_the_old_or_the_new_state_is_there(start, lost, swaps, memory_path, monkeypatch):
    if not swaps:
        monkeypatch.setattr(module, "exchange", lambda one, other: False)
    seen = set()
    last = 0
    while True:
        folder = memory_path / str(last)
        folder.mkdir()
        old = start(folder)
        machine = Machine(last, lost)
        with machine.running():
            Keeper(folder, keep=1).save_now(make_state(2, 2))
        machine.lose(folder)
        found = newest(folder)
        seen.add(found)
        if not machine.died:
            break
        assert found in (old, 2), f"after {machine.trace}"
        write(folder, make_state(3, 3))
        assert newest(folder) == 3
        assert not list(folder.glob(".*"))
        for path in folder.iterdir():
            if lost != "renames":
                verify(path)
        shutil.rmtree(folder)
        last += 1
    assert found == 2, "a write that returned must survive"
    assert seen == {old, 2}
    assert {"open", "write", "fsync", "mkdir"} < set(machine.trace), "the calls of the writer are the ones watched"


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "renames"])
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_a_disk_that_is_full_at_any_call_costs_only_the_new_state(start, swaps, memory_path, monkeypatch):
    """The same boundaries, but the process lives: a typed error, the old state whole, nothing half-written left."""
    if not swaps:
        monkeypatch.setattr(module, "exchange", lambda one, other: False)

    class FullDisk(Machine):
        def call(self, name, *args, **kwargs):
            number = len(self.trace)
            self.trace.append(name)
            if number == self.last or (number > self.last and name in ("write", "mkdir")):
                raise OSError(28, "No space left on device")
            return self.real[name](*args, **kwargs)

    for last in range(60):
        folder = memory_path / str(last)
        folder.mkdir()
        old = start(folder)
        machine = FullDisk(last, "nothing")
        failed = False
        with machine.running():
            try:
                write(folder, make_state(2, 2))
            except StorageFailed as error:
                failed = True
                assert "No space left" in error.why
        assert newest(folder) in (old, 2)
        if not failed:
            assert newest(folder) == 2
        write(folder, make_state(3, 3))
        assert not list(folder.glob(".*"))
        if last >= len(machine.trace):
            break
    else:
        pytest.fail("the write never came to its end")


def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(memory_path):
    write(memory_path, make_state(0, 0))
    for delay_ms in range(0, 40, 3):
        start = newest(memory_path)
        child = os.fork()
        if child == 0:
            try:
                for step in range(start + 1, start + 1000):
                    Keeper(memory_path, keep=2).save_now(make_state(step, step))
            finally:
                os._exit(1)
        time.sleep(delay_ms / 1000)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert newest(memory_path) >= start
        for step in module.list_steps(memory_path):
            assert read(module.path_of(memory_path, step)).values == {"fill": step}
