"""The process that workers are forked from: it has imported torch and done nothing with it.

It stays single-threaded, runs no tensor operation and never touches CUDA, so that a fork of it is as good as a new
process that has paid for the imports. One request makes one worker; the end of the control socket ends all of them.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from echelon.fleet import family
from echelon.fleet.child import adopt_orphans, become_worker, die_with_parent
from echelon.fleet.packets import receive_packet, send_packet
from echelon.fleet.starter import LAUNCHERS_SIGNALS, TOO_MANY_FILES, too_many_files
from echelon.fleet.streams import open_missing

REAP_EVERY_MS = 10_000
PASSED_FDS = 2  # the worker's line and, for rank 0, the store's socket
ONE_THREAD = "OPENBLAS_NUM_THREADS"  # numpy's BLAS starts a thread per core while it is imported


@dataclass
class Template:
    """Serves fork requests on `control`, a sequenced-packet socket: one packet is one JSON message."""

    control: socket.socket
    _ranks: dict[int, int] = field(default_factory=dict)  # pidfd -> rank
    _pids: dict[int, int] = field(default_factory=dict)  # pidfd -> pid

    def serve(self) -> None:
        """Fork and report until the launcher closes its end or is gone; then end all workers, and what they left."""
        listening = True
        while listening:
            waits = select.poll()
            for fd in (self.control.fileno(), *self._ranks):
                waits.register(fd, select.POLLIN)
            ready = {fd for fd, _ in waits.poll(REAP_EVERY_MS)}
            for pidfd in ready & self._ranks.keys():
                self._report_end(pidfd)
            if self.control.fileno() in ready:
                listening = self._obey()
            self._reap_orphans()
        for pidfd in self._ranks:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        family.end_all_below(os.getpid())

    def say(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        send_packet(self.control, message, fds)

    def _obey(self) -> bool:
        message, fds = receive_packet(self.control, PASSED_FDS, wait=True)
        if message is None:
            return False
        try:
            self._fork(message["rank"], fds)
        except OSError as error:
            term, why = "workers", f"the process of rank {message['rank']} cannot be made: {error}"
            if error.errno in TOO_MANY_FILES:
                term, why = too_many_files().term, too_many_files().why
            self.say({"unable": term, "why": why})
        for fd in fds:
            os.close(fd)
        return True

    def _fork(self, rank: int, fds: list[int]) -> None:
        if not fds:
            raise OSError(errno.EMFILE, "the worker's line was not received")  # the kernel drops what finds no room
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.control.close()
            for pidfd in self._ranks:
                os.close(pidfd)
            line, *store = fds
            become_worker(parent, socket.socket(fileno=line), store[0] if store else None)
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd], self._pids[pidfd] = rank, pid
        self.say({"rank": rank, "pid": pid}, [pidfd])

    def _reap_orphans(self) -> None:
        """Processes that workers have left to this one, and that have ended since."""
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._pids.values():
                    return  # a worker: its handle tells
                os.waitpid(ended.si_pid, 0)

    def _report_end(self, pidfd: int) -> None:
        _, status = os.waitpid(self._pids.pop(pidfd), 0)
        self.say({"rank": self._ranks.pop(pidfd), "status": status})
        os.close(pidfd)


def preload(modules: Sequence[str]) -> tuple[str, str] | None:
    """Import `modules`; the first that cannot be imported, with the reason."""
    given = os.environ.get(ONE_THREAD)
    os.environ.setdefault(ONE_THREAD, "1")
    gc.disable()  # imports make a great many objects and hardly any garbage: looking for it takes a fifth of their time
    try:
        for module in modules:
            try:
                import_module(module)
            except Exception as error:  # noqa: BLE001  a broken installation raises anything
                traceback.print_exc()
                return module, f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
        gc.freeze()  # or each worker's first collection would visit, and so copy, everything that was imported (70 MiB)
        if given is None:
            del os.environ[ONE_THREAD]
    return None


def main(control_fd: int, launcher: int) -> None:
    """Import, then serve."""
    die_with_parent(launcher)
    open_missing()
    # Meant for the launcher, which asks all workers to stop: this process has to outlive that.
    for number in LAUNCHERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHERS_SIGNALS)
    adopt_orphans()
    template = Template(socket.socket(fileno=control_fd))
    order, _ = receive_packet(template.control, PASSED_FDS, wait=True)
    failure = preload(order["preload"]) if order else None
    if failure:
        module, why = failure
        template.say({"unable": module, "why": f"it cannot be imported ({why}); install it again"})
        return
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        template.say({"warning": f"importing started {threads - 1} threads, which workers will not have"})
    template.serve()
    os._exit(0)  # taking torch apart takes a second, and there is nothing in it to save


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
