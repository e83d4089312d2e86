"""A worker ends as a program ends: its files are written, its exit handlers run, and what the job started is gone."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleet_workers
import pytest

from echelon.errors import TooFewWorkers, UserError
from echelon.fleet import Start, WorkerStart, launch
from echelon.fleet.family import below

WAYS = ("template", "caller")
SOON_S = 5.0


def run(name: str, way: str, folder: Path, **request: Any) -> list[dict[str, Any]]:
    entry = f"fleet_workers:{name}" if way == "template" else getattr(fleet_workers, name)
    request |= {"folder": str(folder)}
    return launch(Start(entry=entry, workers=2, request=request, preload=()), lambda _event: None)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_of(folder: Path) -> list[str]:
    """What still runs of the processes that the workers started; each has left its id in a file."""
    deadline = time.monotonic() + SOON_S
    while True:
        left = [path.name for path in folder.glob("*.pid") if is_running(int(path.read_text()))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["daemon", "manager", "program"])
def test_what_a_job_has_started_ends_with_it(way: str, kind: str, tmp_path: Path) -> None:
    run("leave_a_process", way, tmp_path, kind=kind)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert left_of(tmp_path) == []


@pytest.mark.parametrize("how", ["done", "raise", "SIGKILL"])
def test_what_a_job_has_started_and_let_go_of_ends_with_it_however_it_ends(how: str, tmp_path: Path) -> None:
    with contextlib.suppress(UserError, TooFewWorkers):
        run("leave_a_process", "template", tmp_path, kind="orphan", how=how)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert left_of(tmp_path) == []


@pytest.mark.parametrize("way", WAYS)
def test_what_a_job_has_started_ends_when_another_worker_fails(way: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run("leave_a_process", way, tmp_path, kind="program", how="raise")
    assert left_of(tmp_path) == []


@pytest.mark.parametrize("way", WAYS)
def test_open_files_are_written_and_exit_handlers_run(way: str, tmp_path: Path) -> None:
    results = run("leave_things_open", way, tmp_path)
    for rank, result in enumerate(results):
        assert (tmp_path / f"log-{rank}").read_text() == "an important line\n"
        assert (tmp_path / f"exit-{rank}").read_text() == "ran"
        assert (tmp_path / f"thread-{rank}").read_text() == "finished"
        assert not Path(result["scratch"]).exists()


@pytest.fixture
def idle() -> Iterator[Any]:
    process = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    process.start()
    yield process
    process.kill()
    process.join(SOON_S)


def test_a_fork_ends_nothing_of_the_caller_s(tmp_path: Path, idle: Any) -> None:
    """Its files are written once, its handlers and children are left alone."""
    atexit.register(handler := (tmp_path / "handled").touch)
    try:
        with (tmp_path / "log").open("w") as log, tempfile.TemporaryDirectory() as scratch:
            log.write("once\n")
            run("leave_things_open", "caller", tmp_path)
            assert Path(scratch).exists()
    finally:
        atexit.unregister(handler)
    assert (tmp_path / "log").read_text() == "once\n"
    assert not (tmp_path / "handled").exists()
    assert idle.is_alive()


def test_a_fork_does_not_hold_the_lock_on_the_run_s_folder(tmp_path: Path) -> None:
    def work(worker: WorkerStart) -> int:
        held = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        worker.tether.send({"kind": "done", "held": held})
        return 0

    lock = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = launch(Start(entry=work, workers=2, run=str(tmp_path)), lambda _event: None)
    finally:
        os.close(lock)
    assert not any(str(tmp_path) in result["held"] for result in results)


def test_the_processes_below_one_are_found_whatever_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "a) R 1 (b").symlink_to(sys.executable)
    text = "import subprocess, time; subprocess.Popen(['sleep', '30']); print(flush=True); time.sleep(30)"
    command = [str(tmp_path / "a) R 1 (b"), "-c", text]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = below(os.getpid())
        assert process.pid in found
        (child,) = below(process.pid)
        assert child in found
        os.kill(child, signal.SIGKILL)
    finally:
        process.kill()
        process.wait(SOON_S)
        process.stdout.close()
