"""Workers forked from the calling process itself, for a job that only lives in its memory (closure, notebook, test)."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from echelon.errors import ConfigError
from echelon.fleet import family
from echelon.fleet.child import HELD_SIGNALS, become_worker
from echelon.fleet.start import WorkerStart
from echelon.fleet.starter import TOO_MANY_FILES, Ended, News, Processes, Started


class CallerStarter:
    """Forks at once. Other threads that the caller has do not exist in the worker."""

    def __init__(self, entry: Callable[[WorkerStart], int]) -> None:
        refuse_after_cuda()
        self._entry = entry
        self._processes = Processes()
        self._pids: dict[int, int] = {}
        self._started: list[News] = []

    def start(self, rank: int, line: socket.socket, store: socket.socket | None, foreign: Sequence[int]) -> None:
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or what is buffered there would be written once more by every worker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                self._live(parent, line, store, foreign)
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                raise
            raise ConfigError("workers", f"the process of rank {rank} cannot be made: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._pids[rank] = pid
        self._processes.add(rank, os.pidfd_open(pid))
        self._started.append(Started(rank=rank, pid=pid))

    def fileno(self) -> int:
        return self._processes.fileno()

    def news(self) -> list[News]:
        started, self._started = self._started, []
        return [*started, *(Ended(rank=rank, status=self._reap(rank)) for rank in self._processes.gone())]

    def close(self) -> list[int]:
        theirs = [pid for worker in self._pids.values() for pid in family.below(worker)]
        left = self._processes.kill()
        family.end(theirs)
        for rank in set(self._pids) - set(left):
            self._reap(rank)
        self._processes.forget()
        return left

    def _live(self, parent: int, line: socket.socket, store: socket.socket | None, foreign: Sequence[int]) -> None:
        try:
            self._processes.forget()
            for fd in foreign:
                os.close(fd)
            become_worker(parent, line, store.detach() if store else None, self._entry)
        finally:
            os._exit(1)  # no way back into the caller's stack, whatever was raised

    def _reap(self, rank: int) -> int | None:
        try:
            return os.waitpid(self._pids.pop(rank), 0)[1]
        except ChildProcessError:
            return None  # the caller waits for any child in a thread of its own and was faster


def refuse_after_cuda() -> None:
    """CUDA does not survive a fork, and fails in the worker with an error that says nothing about the cause."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise ConfigError(
            "job",
            "it can only be reached by forking this process, which uses CUDA already, and CUDA survives no fork; "
            "put the job into a file, at module level, and start it with `echelon train FILE`, or use no CUDA before",
        )
