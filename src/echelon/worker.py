"""One worker process, from its environment to its exit code. The only reader of environment variables."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from echelon.errors import ConfigError, PeerLost
from echelon.events import Event
from echelon.fleet import Tether, WorkerStart
from echelon.progress import progress
from echelon.request import Request, Source

if TYPE_CHECKING:  # the launcher asks for its port here, and starts without torch
    from echelon.comm import Meeting

GO_PATIENCE_S = 24 * 3600.0
INSIDE = "ECHELON_WORKER"


class TetherLine:
    """The line of a worker that our launcher has started."""

    def __init__(self, tether: Tether) -> None:
        self._tether = tether

    def meet(self) -> None:
        self._tether.send({"kind": "ready"})
        self._tether.wait_go(GO_PATIENCE_S)

    def show(self, record: Event) -> None:
        self._tether.send({"kind": "event", "event": record})

    def stop_requested(self) -> bool:
        return self._tether.stop_requested


def run_worker(start: WorkerStart) -> int:
    """The worker function of a process that imports the job again."""
    request = Request(**start.request)
    assert request.source is not None
    source = Source(**request.source)
    return _run(start, lambda: source.load(start.rank), forked=False)


def run_with(job: Any) -> Callable[[WorkerStart], int]:
    """The worker function of a fork of the process that holds the job.

    What every worker would import at its first step is imported here, once, before the forks.
    """
    import torch._dynamo  # noqa: F401

    import echelon.one_worker  # noqa: F401

    return lambda start: _run(start, lambda: job, forked=True)


def _run(start: WorkerStart, load: Callable[[], Any], forked: bool) -> int:
    from echelon.comm import Meeting
    from echelon.one_worker import run_one
    from echelon.place import Place

    be_inside()

    def meeting() -> Meeting:
        return Meeting(
            rank=start.rank, size=start.workers, host="127.0.0.1", port=start.store_port, listen_fd=start.store_fd
        )

    place = Place(
        rank=start.rank,
        workers=start.workers,
        local_rank=start.rank,
        local_workers=start.workers,
        cores=len(os.sched_getaffinity(0)),
        forked=forked,
    )
    payload = run_one(Request(**start.request), place, meeting, load, TetherLine(start.tether))
    start.tether.send({"kind": "done", **payload})
    return 0


def be_inside() -> None:
    """From here on this process is a worker: what it imports must not start a training run of its own."""
    os.environ[INSIDE] = "1"


def workers_around_us() -> int | None:
    """How many workers torchrun (or its like) has started, this process being one; None if it has not."""
    if os.environ.get(INSIDE):
        raise ConfigError(
            "train",
            "was called while a worker was importing the job; put the call under: if __name__ == '__main__':",
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None


def rank_around_us() -> int:
    return int(os.environ.get("RANK", "0"))


def port_wanted() -> int | None:
    """The rendezvous port that the environment asks for."""
    port = os.environ.get("MASTER_PORT")
    if port and not port.isdecimal():
        raise ConfigError("port", f"MASTER_PORT is {port!r}, which is no port number")
    return int(port) if port else None


def run_joined(request: Request, job: Any) -> dict[str, Any]:
    """Be one of torchrun's workers."""
    from echelon.comm import Meeting
    from echelon.one_worker import run_one
    from echelon.place import Place

    environment = os.environ
    rank, workers = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local = int(environment.get("LOCAL_WORLD_SIZE", workers))
    place = Place(
        rank=rank,
        workers=workers,
        local_rank=int(environment.get("LOCAL_RANK", rank)),
        local_workers=local,
        cores=len(os.sched_getaffinity(0)),
    )

    def meeting() -> Meeting:
        return Meeting(
            rank=rank,
            size=workers,
            host=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environment.get("MASTER_PORT", "29500")),
            serve=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    with stop_on_signals() as stopping:
        line = TerminalLine(stopping, rank)
        try:
            return run_one(request, place, meeting, lambda: job, line)
        except PeerLost as error:
            # Only a symptom: the rank that failed tells the cause, and nobody needs the traceback of every other one.
            sys.stderr.write(f"echelon: rank {rank}: {error}; another rank says why\n")
            raise SystemExit(error.exit_code) from None
        finally:
            line.close()


class TerminalLine:
    """The line of a worker that nobody of ours has started: rank 0 prints, signals ask to stop."""

    def __init__(self, stopping: threading.Event, rank: int) -> None:
        self._stopping = stopping
        self._progress = progress(sys.stdout) if rank == 0 else None

    def meet(self) -> None:
        """The group's own joining waits for everybody."""

    def show(self, record: Event) -> None:
        if self._progress is not None:
            self._progress(record)

    def stop_requested(self) -> bool:
        return self._stopping.is_set()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Turn SIGTERM and SIGINT into a request to stop, where this thread may; as they were afterwards."""
    stopping = threading.Event()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        stopping.set()

    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
