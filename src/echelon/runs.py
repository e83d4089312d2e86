"""Run folders: which one a run gets, that no other run writes to it, and what becomes of an earlier run there."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from echelon.errors import ConfigError, StorageFailed

RUNS = Path("runs")
PARTS = ("job.json", "events.jsonl", "checkpoints", "model.safetensors")
EARLIER = "earlier"
# Why a folder cannot go beside another: a mount point, a folder above that is not ours, a disk that is full there.
NOT_BESIDE = {errno.EXDEV, errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC}


@contextmanager
def claim(out: str, name: str, *, resume: bool, base: str = "") -> Iterator[Path]:
    """The folder of a run, there and locked until the end of the block. `out` empty: one named by `name` and the time;
    to resume, the newest of that name that can be resumed. All is seen from `base`; what is given back is what people
    call the folder.

    A folder in which nothing was left is taken away again. Whatever an earlier run left stays (see `set_aside`).
    """
    home = Path(base)
    run = Path(out) if out else (_newest(home, name) if resume else None)
    try:
        if run is None:
            run = _make_new(home, name)
        else:
            (home / run).mkdir(parents=True, exist_ok=True)
        place = os.open(home / run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(run or RUNS, error) from error
    try:
        _lock(run, place)
        _probe(home, run)
        yield run
    finally:
        if run != Path():  # the folder that the command was given in is nobody's to take away
            take_away_if_empty(home / run)
        os.close(place)


def take_away_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _lock(run: Path, place: int) -> None:
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = f"{run} belongs to a run that is still going on; wait for its end, or name another folder with --out"
        raise ConfigError("out", why) from error
    except OSError:
        return  # a file system without locks


def _probe(home: Path, run: Path) -> None:
    try:
        probe = home / run / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unusable(run, error) from error


def _unusable(run: Path, error: OSError) -> StorageFailed:
    return StorageFailed(str(run), f"{error.strerror or error}; choose a writable folder with --out")


def _make_new(home: Path, name: str) -> Path:
    """A folder that nobody else has: two runs may start in the same second."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005  a name for people
    (home / RUNS).mkdir(parents=True, exist_ok=True)
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return RUNS / _make_numbered(home / RUNS / name for name in names).name


def _make_numbered(names: Iterable[Path]) -> Path:
    for name in names:
        with suppress(FileExistsError):
            name.mkdir()
            return name
    raise AssertionError("there is always another number")


def _newest(home: Path, name: str) -> Path | None:
    """The newest run of exactly this name that has a checkpoint."""
    pattern = re.compile(rf"{re.escape(name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = [
        (match[1], int(match[2] or 1), run) for run in (home / RUNS).glob("*") if (match := pattern.fullmatch(run.name))
    ]
    able = [entry for entry in found if any((entry[2] / "checkpoints").glob("step-*"))]
    return RUNS / max(able)[2].name if able else None


def set_aside(run: Path, base: str = "") -> Path | None:
    """Move an earlier run out of the way, never mix with or delete it; where it is now. What is no part of a run stays
    where it is. `base` as for `claim`.

    It goes beside the folder: runs/a becomes runs/a.1. Where that is another file system (the folder is a mount
    point) or not ours to write to, it goes inside: runs/a/earlier.1.
    """
    whole = Path(base, run).resolve()
    there = [part for part in PARTS if os.path.lexists(whole / part)]
    if not there:
        return None
    beside = (whole.with_name(f"{whole.name}.{number}") for number in count(1))
    try:
        try:
            moved = _move(whole, there, beside)
        except OSError as error:
            if error.errno not in NOT_BESIDE:
                raise
            moved = _move(whole, there, (whole / f"{EARLIER}.{number}" for number in count(1)))
            return run / moved.name
    except OSError as error:
        why = f"the earlier run there cannot be moved: {error.strerror or error}; use --resume, or another --out"
        raise StorageFailed(str(run), why) from error
    return run.with_name(moved.name) if run.name else moved


def _move(run: Path, parts: Sequence[str], names: Iterable[Path]) -> Path:
    """All of the parts into the first new folder of these names, or none of them."""
    target = _make_numbered(names)
    moved: list[str] = []
    try:
        for part in parts:
            (run / part).rename(target / part)
            moved.append(part)
    except OSError:
        with suppress(OSError):
            for part in moved:
                (target / part).rename(run / part)
            target.rmdir()
        raise
    return target
