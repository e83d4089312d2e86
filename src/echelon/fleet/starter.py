"""The seam between the launcher and a way to make worker processes, and a hold on the processes made."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from echelon.errors import ConfigError, EchelonError

KILL_PATIENCE_S = 10.0
# For the launcher alone, wherever they are sent: it asks all workers to stop.
LAUNCHERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass(frozen=True, kw_only=True)
class Started:
    """The worker has a process."""

    rank: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The worker's process is gone; `status` as `waitpid` gives it, None when it could not be learnt."""

    rank: int
    status: int | None


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The starter itself is gone, and its workers with it."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Unable:
    """No worker can be started at all."""

    error: EchelonError


@dataclass(frozen=True, kw_only=True)
class Warned:
    """Something a user should know, which ends nothing."""

    message: str


News = Started | Ended | Lost | Unable | Warned


def too_many_files() -> ConfigError:
    why = "too few files may be open at a time to start so many workers; allow more (`ulimit -n 4096`), or start fewer"
    return ConfigError("ulimit -n", why)


class Starter(Protocol):
    """One way of making worker processes. Called by the launcher alone, from one thread."""

    def start(self, rank: int, line: socket.socket, store: socket.socket | None, foreign: Sequence[int]) -> None:
        """Make the process of `rank`, which owns `line` and `store`; it closes the launcher's `foreign` descriptors."""

    def fileno(self) -> int:
        """Readable when there may be news."""

    def news(self) -> list[News]:
        """What has happened since the last call; never waits."""

    def close(self) -> list[int]:
        """End every process that is left and whatever else was started. Ranks that would not die even so."""


@dataclass
class Processes:
    """Worker processes by descriptor: an id may be given to another process, and a zombie looks alive by its id."""

    _handles: dict[int, int] = field(default_factory=dict)
    _waits: select.epoll = field(default_factory=select.epoll)

    def add(self, rank: int, pidfd: int) -> None:
        self._handles[rank] = pidfd
        self._waits.register(pidfd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._waits.fileno()

    def gone(self) -> list[int]:
        """Ranks whose process has ended, each told once."""
        ready = {fd for fd, _ in self._waits.poll(0)}
        ranks = [rank for rank, fd in self._handles.items() if fd in ready]
        for rank in ranks:
            self.drop(rank)
        return ranks

    def drop(self, rank: int) -> None:
        fd = self._handles.pop(rank)
        self._waits.unregister(fd)
        os.close(fd)

    def kill(self) -> list[int]:
        """End all that are left, and see them end. Ranks that did not within the bound."""
        for fd in self._handles.values():
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended already and its parent has seen it
        deadline = time.monotonic() + KILL_PATIENCE_S
        for rank, fd in list(self._handles.items()):
            wait = select.poll()
            wait.register(fd, select.POLLIN)
            if wait.poll(max(deadline - time.monotonic(), 0) * 1000):
                self.drop(rank)
        return sorted(self._handles)

    def forget(self) -> None:
        """Give the descriptors back; the processes are left as they are."""
        for fd in self._handles.values():
            os.close(fd)
        self._handles.clear()
        self._waits.close()
