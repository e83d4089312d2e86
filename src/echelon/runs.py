"""Run folders: which one a run gets, that no other run writes to it, and what becomes of an earlier run there."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from echelon.errors import ConfigError, StorageFailed

RUNS = Path("runs")
PARTS = ("job.json", "events.jsonl", "checkpoints", "model.safetensors")


@contextmanager
def claim(out: str, name: str, *, resume: bool) -> Iterator[Path]:
    """The folder of a run, there and locked until the end of the block. `out` empty: one named by `name` and the time;
    to resume, the newest of that name that can be resumed.

    A folder in which nothing was left is taken away again. Whatever an earlier run left stays (see `set_aside`).
    """
    run = Path(out) if out else (_newest(name) if resume else None)
    try:
        if run is None:
            run = _make_new(name)
        else:
            run.mkdir(parents=True, exist_ok=True)
        place = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(run or RUNS, error) from error
    try:
        _lock(run, place)
        _probe(run)
        yield run
    finally:
        with suppress(OSError):
            run.rmdir()  # only if it is empty
        os.close(place)


def _lock(run: Path, place: int) -> None:
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = f"{run} belongs to a run that is still going on; wait for its end, or name another folder with --out"
        raise ConfigError("out", why) from error
    except OSError:
        return  # a file system without locks


def _probe(run: Path) -> None:
    try:
        probe = run / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unusable(run, error) from error


def _unusable(run: Path, error: OSError) -> StorageFailed:
    return StorageFailed(str(run), f"{error.strerror or error}; choose a writable folder with --out")


def _make_new(name: str) -> Path:
    """A folder that nobody else has: two runs may start in the same second."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005  a name for people
    RUNS.mkdir(parents=True, exist_ok=True)
    return _make_numbered(RUNS / (stem if number == 1 else f"{stem}-{number}") for number in count(1))


def _make_numbered(names: Iterable[Path]) -> Path:
    for name in names:
        with suppress(FileExistsError):
            name.mkdir()
            return name
    raise AssertionError("there is always another number")


def _newest(name: str) -> Path | None:
    """The newest run of exactly this name that has a checkpoint."""
    pattern = re.compile(rf"{re.escape(name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = [(match[1], int(match[2] or 1), run) for run in RUNS.glob("*") if (match := pattern.fullmatch(run.name))]
    able = [entry for entry in found if any((entry[2] / "checkpoints").glob("step-*"))]
    return max(able)[2] if able else None


def set_aside(run: Path) -> Path | None:
    """Move an earlier run out of the way, never mix with or delete it; where it is now. What is no part of a run stays
    where it is.
    """
    there = [run / part for part in PARTS if (run / part).exists()]
    if not there:
        return None
    whole = run.resolve()
    try:
        moved = _make_numbered(whole.with_name(f"{whole.name}.{number}") for number in count(1))
        for part in there:
            part.rename(moved / part.name)
    except OSError as error:
        raise StorageFailed(str(run), f"the earlier run there cannot be moved: {error.strerror or error}") from error
    return run.with_name(moved.name) if run.name else moved
