"""The processes below a process, as /proc tells of them, and their end: what a job starts ends with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROUNDS, PAUSE_S = 100, 0.01  # until what was killed is gone; a process that waits for a disk cannot be


def below(pid: int) -> list[int]:
    """The living processes that `pid` has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it is gone by now
                # proc_pid_stat(5): state and parent follow the name, which may hold anything.
                state, parent, *_ = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(folder.name))
    found = children.get(pid, [])
    for each in found:
        found += children.get(each, [])
    return found


def end_all_below(pid: int) -> None:
    """Also those that are started, or become children of `pid`, meanwhile."""
    for _ in range(ROUNDS):
        found = below(pid)
        if not found:
            return
        end(found)
        time.sleep(PAUSE_S)


def end(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
