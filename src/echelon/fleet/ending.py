"""What a Python program does at its end, for a worker: it leaves by `os._exit`, for taking torch apart takes a second.

The parts that a user counts on are done: threads are waited for, `atexit` runs, open files are written, and what the
job has started and left is ended. How long all that may take is for the launcher to say.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from echelon.fleet import family


def disown() -> None:
    """In a fork of the caller: what the caller has left for its own end, or written and not flushed, stays with it.

    `multiprocessing` does the same in its own forks, for its own part.
    """
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    started, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if started is not None and util is not None:
        started._children.clear()
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)
    gc.freeze()  # whatever is found from now on is the worker's own


class Forks:
    """What the job forks ends when it is asked to: SIGTERM to it is no request to stop the run.

    The signal is held back around the fork, or one that comes too early would find the worker's handler, and be lost.
    """

    def __init__(self, worker_s: Callable[[int, FrameType | None], None]) -> None:
        self._worker_s = worker_s
        self._before = threading.local()
        os.register_at_fork(before=self._hold, after_in_parent=self._go_on, after_in_child=self._end_when_asked)

    def _hold(self) -> None:
        self._before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _go_on(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before.mask)

    def _end_when_asked(self) -> None:
        if signal.getsignal(signal.SIGTERM) is self._worker_s:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._go_on()


def wind_up() -> None:
    """End as a program ends, all but the last exit."""
    for part in (threading._shutdown, atexit._run_exitfuncs, _write_open_files, _end_family):  # type: ignore[attr-defined]
        try:
            part()
        except BaseException:  # noqa: BLE001  the training is done, and the other parts are still to come
            traceback.print_exc()


def _write_open_files() -> None:
    writers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for file in [each for each in gc.get_objects() if issubclass(type(each), writers)]:
        with suppress(OSError, ValueError):  # closed, or with nobody to read it
            file.flush()


def _end_family() -> None:
    family.end_all_below(os.getpid())
