"""What a freshly forked process does to become a worker, and how it ends. It never returns to whoever forked it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any, Never

from echelon.errors import (
    LINE_LIMIT,
    TRACE_LIMIT,
    Bug,
    ConfigError,
    EchelonError,
    UserError,
    encode,
    headline,
    shorten,
)
from echelon.fleet.ending import Forks, disown, wind_up
from echelon.fleet.start import WorkerStart
from echelon.fleet.streams import STDERR, open_missing
from echelon.fleet.tether import Tether

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
START_PATIENCE_S = 60.0
FLUSH_PATIENCE_S = 60.0
STDIN = 0
# Held back around a fork, until the child has its own handlers.
HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Found before any fork: in a child of a process with threads, looking a symbol up may wait for a lock nobody holds.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def adopt_orphans() -> None:
    """Be the parent of every process below this one whose own parent is gone."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that made it ends; `parent` tells whether it has already.

    The launching thread stays in `launch` for as long as there are workers, so its end is the launcher's end.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_worker(
    parent: int,
    line: socket.socket,
    store_fd: int | None,
    entry: Callable[[WorkerStart], int] | None = None,
) -> Never:
    """Run the worker that the first message on `line` describes, to the end of this process.

    `entry` is the function when the fork has brought it along; otherwise the message names it.
    """
    code = 1
    try:
        die_with_parent(parent)
        open_missing()
        tether = Tether(line)
        _take_signals(tether)
        faulthandler.enable(STDERR)
        start, *more = tether.receive(START_PATIENCE_S)
        _set_environment(start)
        _leave_terminal(start["workers"])
        _own_random_state()
        if entry is not None:
            disown()
            _one_torch_thread()
        for message in more:
            tether.deliver(message)
        tether.listen()
        code = _run(start, tether, store_fd, entry)
        tether.flush(FLUSH_PATIENCE_S)
        wind_up()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  the last frame of this process: nothing is left that could take it
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(
    start: dict[str, Any], tether: Tether, store_fd: int | None, entry: Callable[[WorkerStart], int] | None
) -> int:
    """Call the worker function; whatever it raises goes to the launcher."""
    rank = start["rank"]
    worker = WorkerStart(
        rank=rank,
        workers=start["workers"],
        tether=tether,
        request=start["request"],
        store_port=start["store_port"],
        store_fd=store_fd,
    )
    try:
        return int((entry or _find(start["entry"]))(worker))
    except BaseException as error:  # noqa: BLE001  whatever it is, the launcher is told
        failure = _typed(rank, error)
    try:
        tether.send({"kind": "failed", "error": encode(failure)})
    except (TypeError, ValueError):  # its fields are no JSON, or too long
        tether.send({"kind": "failed", "error": _speakable(encode(failure))})
    return failure.exit_code


def _speakable(values: dict[str, Any]) -> dict[str, Any]:
    """An error's values as far as a line can carry them; its type is what matters most."""
    plain = (int, float, type(None))
    return {name: v if isinstance(v, plain) else shorten(str(v), TRACE_LIMIT) for name, v in values.items()}


def _typed(rank: int, error: BaseException) -> EchelonError:
    if isinstance(error, EchelonError):
        return error
    if isinstance(error, SystemExit):
        status = shorten(repr(error.code), LINE_LIMIT)
        return UserError(rank, f"the job called exit({status}) before it had finished", _trace(error))
    return Bug(rank, headline(error), _trace(error))


def _trace(error: BaseException) -> str:
    return shorten("".join(traceback.format_exception(error)), TRACE_LIMIT)


def _find(entry: str) -> Callable[[WorkerStart], int]:
    module, _, name = entry.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("entry", f"{entry} cannot be found: {error}") from error
    if not callable(found):
        raise ConfigError("entry", f"{entry} is no function")
    return found  # type: ignore[no-any-return]


def _take_signals(tether: Tether) -> None:
    """A terminal's Ctrl-C, and its end, are for the launcher, which asks all to stop. SIGTERM, too, stops the run, not
    one worker.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ask(_signal: int, _frame: FrameType | None) -> None:
        tether.ask_to_stop()

    signal.signal(signal.SIGTERM, ask)
    Forks(ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)


def _set_environment(start: dict[str, Any]) -> None:
    """What a worker finds under torchrun, too."""
    rank, workers = str(start["rank"]), str(start["workers"])
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=workers, LOCAL_WORLD_SIZE=workers)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(start["store_port"]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.argv[:] = start["argv"]


def _leave_terminal(workers: int) -> None:
    """Several processes cannot share a keyboard: reading it ends at once. A single one may, for a debugger."""
    if workers > 1:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, STDIN)
        os.close(nothing)


def _one_torch_thread() -> None:
    """A fork has none of the caller's OpenMP threads but counts on them: with more than one, operations never end."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _own_random_state() -> None:
    """Nobody draws the numbers that a sibling or the forking process draws, only because a fork copied a generator.

    Every generator gets what it has in a new process: a seed from the system. Python does this for `random` itself.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
