"""A worker's end of the line to its launcher: messages both ways, and no life without the launcher.

The line is a socket pair: its end of file means that the launcher is gone, however it died, and ends the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from typing import Any, Never

from echelon.errors import Timeout
from echelon.fleet.streams import STDERR
from echelon.fleet.wire import Garbled, Lines, to_line

BACKLOG_LIMIT_BYTES = 64 << 20
SEND_PATIENCE_S = 60.0


class Tether:
    """Made in the worker process by the fleet; one daemon thread listens from `listen` on.

    `send` does not wait for a launcher that is slow to read (a terminal may be paused): what it cannot send at once is
    kept and sent by the thread.
    """

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        self._lines = Lines()
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._sent = threading.Condition(self._lock)
        self._arrived = threading.Condition()
        self._go: dict[str, Any] | None = None
        self._stop = False
        self._asks_to_stop = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def stop_requested(self) -> bool:
        """Whether the launcher asked to stop. Workers learn of it at different moments and must agree on the step."""
        return self._stop

    def wait_go(self, timeout_s: float) -> dict[str, Any]:
        """The launcher's `go`, which it sends when every worker is ready."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._go is not None, timeout_s):
                raise Timeout("waiting for the other workers to get ready", timeout_s)
            assert self._go is not None
            return self._go

    def send(self, message: dict[str, Any]) -> None:
        """Tell the launcher. In order, without waiting, except for room when a great deal has piled up."""
        line = to_line(message)
        with self._sent:
            self._write_backlog()
            if not self._sent.wait_for(lambda: self._backlog_bytes < BACKLOG_LIMIT_BYTES, SEND_PATIENCE_S):
                raise Timeout("telling the launcher", SEND_PATIENCE_S)
            self._backlog.append(line)
            self._backlog_bytes += len(line)
            self._write_backlog()
            left = bool(self._backlog)
        if left:
            self._wake()

    def ask_to_stop(self) -> None:
        """Ask the launcher to stop the run. Safe in a signal handler: it takes no lock."""
        self._asks_to_stop = True
        self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Whether everything that was sent has left this process within `timeout_s`."""
        with self._sent:
            return self._sent.wait_for(lambda: not self._backlog, timeout_s)

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """The first messages, before there is a thread: the start itself comes this way."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        while True:
            if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise Timeout("waiting for the launcher", timeout_s)
            messages = self._read()
            if messages:
                return messages

    def listen(self) -> None:
        """Start the thread that obeys the launcher."""
        threading.Thread(target=self._listen_to_the_end, name="echelon-tether", daemon=True).start()

    def deliver(self, message: dict[str, Any]) -> None:
        """Act on one message of the launcher."""
        with self._arrived:
            if message["kind"] == "stop":
                self._stop = True
            elif message["kind"] == "go":
                self._go = message
            self._arrived.notify_all()

    def _listen_to_the_end(self) -> None:
        try:
            self._listen()
        except OSError as error:  # the job has closed descriptors that are not its own
            _die(f"its line to the launcher broke ({error.strerror})")

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while True:
            poll.register(self._line, select.POLLIN | (select.POLLOUT if self._backlog else 0))
            ready = dict(poll.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                if self._asks_to_stop:
                    self._asks_to_stop = False
                    self.send({"kind": "stop"})
            events = ready.get(self._line.fileno(), 0)
            if events & select.POLLOUT:
                with self._sent:
                    self._write_backlog()
            if events & ~select.POLLOUT:
                for message in self._read():
                    self.deliver(message)

    def _read(self) -> list[dict[str, Any]]:
        try:
            data = self._line.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            _die(f"its line to the launcher broke ({error.strerror})")
        if not data:
            _die("the launcher is gone")
        try:
            return self._lines.feed(data)
        except Garbled:
            _die("what came over its line is no message")  # whoever speaks there is not our launcher

    def _write_backlog(self) -> None:
        """As much as the socket takes now. The lock is held."""
        while self._backlog:
            line = self._backlog.popleft()
            taken = self._write(line)
            self._backlog_bytes -= taken
            if taken < len(line):
                self._backlog.appendleft(line[taken:])
                break
        self._sent.notify_all()

    def _write(self, line: bytes) -> int:
        try:
            return self._line.send(line, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            _die(f"its line to the launcher broke ({error.strerror})")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of reasons to wake up already
            os.write(self._wake_write, b"x")


def _die(why: str) -> Never:
    with contextlib.suppress(OSError):
        if select.select([], [STDERR], [], 0)[1]:  # nobody may read it any more
            os.write(STDERR, f"echelon: worker process {os.getpid()} ends itself: {why}\n".encode())
    # SIGKILL and not an exit: no hook, no lock and no user code may keep an orphan alive.
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")
