"""Signals in a worker that nobody of ours has started: stop after the step, or end where nothing is lost.

before anybody trains          |  while all train
the first one ends, code 75    |  the first one asks to stop; Ctrl-C, later, ends, code 75
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OVER = 0  # what the pipe says at the end; no signal has this number
SAME_REQUEST_S = 1.0  # one Ctrl-C may come twice: from the terminal, and from torchrun, which hands it on
PATIENCE_S = 5.0


class Stopping:
    """What the signals have asked for so far."""

    def __init__(self) -> None:
        self.training = False
        self._asked_at: float | None = None

    def obey(self) -> bool:
        """Whether to stop, for one who will ask again after every step: from now on a request waits for that."""
        self.training = True
        return self._asked_at is not None

    def hear(self, number: int, now: float) -> bool:
        """A signal has come; whether it ends the process at once. While all train only a person insists."""
        if not self.training:
            return True
        if self._asked_at is None:
            self._asked_at = now
        return number == signal.SIGINT and now - self._asked_at > SAME_REQUEST_S


@contextmanager
def stop_on_signals(stopping: Stopping, end: Callable[[], None]) -> Iterator[None]:
    """Turn signals into requests to stop, where this thread may; as they were afterwards. `end` ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int) -> None:
        if stopping.hear(number, time.monotonic()):
            end()

    listener = Listener(hear)
    try:
        yield
    finally:
        listener.close()


class Listener:
    """Calls `hear` for every signal, in a thread of its own.

    Python runs no handler while C++ waits for a peer, which it does for minutes. But the interpreter writes the number
    of a signal to a pipe at the moment it comes, and a thread can read that.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        # What is ignored stays ignored; None is a handler that Python knows nothing of.
        self._before = {number: h for number, h in handlers.items() if h not in (signal.SIG_IGN, None)}
        self._reads, self._writes = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writes, False)
        self._open = True
        self._thread = threading.Thread(target=self._listen, name="echelon-signals", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        for number in self._before:
            signal.signal(number, _leave_it_to_the_thread)
        # A data loader's process that is ended must end, and not stop this one. Until it is ready it gets no signal.
        self._held = threading.local()
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._leave)

    def close(self) -> None:
        """Signals are as they were before."""
        self._give_back()
        os.write(self._writes, bytes([OVER]))  # closing it would not do: a child may hold it open
        self._thread.join(PATIENCE_S)
        os.close(self._writes)

    def _give_back(self) -> None:
        if not self._open:
            return
        self._open = False
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hold(self) -> None:
        if self._open:
            self._held.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _release(self) -> None:
        before = self._held.__dict__.pop("before", None)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _leave(self) -> None:
        self._give_back()
        self._release()

    def _listen(self) -> None:
        while (numbers := os.read(self._reads, 64)) and OVER not in numbers:
            for number in numbers:
                if number in self._before:
                    self._hear(number)
        os.close(self._reads)


def _leave_it_to_the_thread(_signal: int, _frame: FrameType | None) -> None:
    """There must be a handler, or the signal itself would end the process."""
