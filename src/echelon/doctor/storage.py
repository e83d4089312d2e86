"""Where runs are written: may one write there, is there room, how fast is it; and the shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from echelon.doctor.finding import Finding, missing, ok, warning

GIB, MIB = 2**30, 2**20
LEAST_FREE = 2 * GIB
LEAST_SHARED = 64 * MIB  # what containers get by default, and it is too little for data loaders
WRITE_BYTES = 64 * MIB
SLOW = 50e6  # bytes/s: a checkpoint of 1 GB would take 20 s


def check_folder(folder: Path) -> Iterator[Finding]:
    """The folder need not exist: then what is above it is looked at. Nothing is left behind."""
    name, there = f"{folder}/", _nearest(folder)
    if not there.is_dir():
        yield missing("run folder", f"{there} is not a folder", "choose another with --out", needed=True)
        return
    try:
        free = shutil.disk_usage(there).free
        rate = write_speed(there, min(WRITE_BYTES, free // 4))
    except OSError as error:
        why = error.strerror or str(error)
        yield missing("run folder", f"{name} {why}", "make it writable, or choose another with --out", needed=True)
        return
    room = f"{free / GIB:.1f} GiB free for {name}"
    yield (
        ok("disk", room)
        if free >= LEAST_FREE
        else warning("disk", room, "make room: checkpoints are several models in size")
    )
    speed = f"{rate / 1e6:,.0f} MB/s to disk"
    yield (
        ok("writing", speed)
        if rate >= SLOW
        else warning("writing", speed, "checkpoints will take long; try --out on another disk")
    )


def write_speed(folder: Path, size: int) -> float:
    """Bytes a second into a file that goes away again, flushed to the disk as checkpoints are."""
    block = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        began, written = time.perf_counter(), 0
        while written < max(size, MIB):
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - began)


def check_shared_memory(mount: Path) -> Finding:
    try:
        usage = shutil.disk_usage(mount)
    except OSError:
        return warning(str(mount), "not there", "mount a tmpfs on it: data loaders with workers use it")
    detail = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if not os.access(mount, os.W_OK):
        return warning(str(mount), "not writable", f"chmod 1777 {mount}: data loaders with workers use it")
    if usage.free <= LEAST_SHARED:
        return warning(str(mount), detail, "give the container more (docker run --shm-size=2g)")
    return ok(str(mount), detail)


def _nearest(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
