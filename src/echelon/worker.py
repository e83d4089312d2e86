"""One worker process, from its environment to its exit code. The only reader of environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Never

from echelon.errors import ConfigError, PeerLost, Stopped
from echelon.events import Event
from echelon.fleet import Tether, WorkerStart
from echelon.progress import progress
from echelon.request import Request, Source
from echelon.runs import take_away_if_empty
from echelon.signals import Stopping, stop_on_signals

if TYPE_CHECKING:  # the launcher asks for its port here, and starts without torch
    from echelon.comm import Meeting

GO_PATIENCE_S = 24 * 3600.0
STDERR = 2
INSIDE = "ECHELON_WORKER"
DEFAULT_PORT, LAST_PORT = 29500, 65535  # the first is torch.distributed's own


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

    return lambda start: _run(start, lambda: _checked(job), forked=True)


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


def _checked(job: Any) -> Any:
    """A job that this process has not imported: what else has its code done?"""
    from echelon.place import check_process

    check_process()
    return job


def be_inside() -> None:
    """From here on this process is a worker: what it imports must not start a training run of its own."""
    os.environ[INSIDE] = "1"


def workers_around_us() -> int | None:
    """How many workers torchrun (or its like) has started, this process being one; None if it has not."""
    if os.environ.get(INSIDE):
        raise ConfigError(
            "train",
            "was called inside a worker; at the top of the job's file, put the call under: if __name__ == '__main__':",
        )
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    workers = _number("WORLD_SIZE", least=1)
    _number("RANK", most=workers - 1)
    return workers


def rank_around_us() -> int:
    """This process's rank among them; 0 if it is alone."""
    return _number("RANK") if "WORLD_SIZE" in os.environ else 0


def _number(name: str, *, least: int = 0, most: int | None = None, default: int = 0) -> int:
    """What the environment says; a number that cannot be is refused."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(
            name,
            f"is {text!r} in the environment, and must be a whole number {bounds}: torchrun sets it; to train without "
            "another launcher, unset RANK and WORLD_SIZE",
        )
    return int(text)


def port_wanted() -> int | None:
    """The rendezvous port that the environment asks for."""
    port = os.environ.get("MASTER_PORT")
    if port and (not port.isdecimal() or int(port) > LAST_PORT):
        raise ConfigError("port", f"MASTER_PORT is {port!r}, which is no port number")
    return int(port) if port else None


def meeting_around_us() -> Meeting:
    """Where the workers that torchrun has started find each other."""
    from echelon.comm import Meeting

    environment = os.environ
    workers = _number("WORLD_SIZE", least=1)
    return Meeting(
        rank=_number("RANK", most=workers - 1),
        size=workers,
        host=environment.get("MASTER_ADDR") or "127.0.0.1",
        port=port_wanted() or DEFAULT_PORT,
        serve=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def run_joined(request: Request, job: Any) -> dict[str, Any]:
    """Be one of torchrun's workers."""
    from echelon.one_worker import run_one
    from echelon.place import Place

    workers = _number("WORLD_SIZE", least=1)
    rank = _number("RANK", most=workers - 1)
    place = Place(
        rank=rank,
        workers=workers,
        local_rank=_number("LOCAL_RANK", default=rank),
        local_workers=_number("LOCAL_WORLD_SIZE", least=1, most=workers, default=workers),
        cores=len(os.sched_getaffinity(0)),
    )
    meeting = meeting_around_us()
    stopping = Stopping()
    line = TerminalLine(stopping, rank)
    with stop_on_signals(stopping, lambda: _end_at_once(request, rank, stopping, line)):
        try:
            return run_one(request, place, lambda: meeting, lambda: _checked(job), line)
        except PeerLost as error:
            # Only a symptom: the rank that failed tells the cause, and nobody needs the traceback of every other one.
            cause = "another rank says why" if error.rank < 0 else f"rank {error.rank} says why, unless it was killed"
            sys.stderr.write(f"echelon: rank {rank}: {error}; {cause}\n")
            raise SystemExit(error.exit_code) from None
        finally:
            line.close()


def _end_at_once(request: Request, rank: int, stopping: Stopping, line: TerminalLine) -> Never:
    """Without a word to the main thread: it may be waiting for a peer, where nothing reaches it."""
    why = "ended by the second request to stop; go on from the last checkpoint with --resume"
    if not stopping.training:
        why = str(Stopped(step=0, run=""))
    with suppress(OSError):
        line.close()
    if request.out:
        take_away_if_empty(request.folder)
    with suppress(OSError):
        os.write(STDERR, f"echelon: rank {rank}: {why}\n".encode())
    os._exit(Stopped.exit_code)


class TerminalLine:
    """The line of a worker that nobody of ours has started: rank 0 prints, signals ask to stop."""

    def __init__(self, stopping: Stopping, rank: int) -> None:
        self._stopping = stopping
        self._progress = progress(sys.stdout) if rank == 0 else None

    def meet(self) -> None:
        """The group's own joining waits for everybody."""

    def show(self, record: Event) -> None:
        if self._progress is not None:
            self._progress(record)

    def stop_requested(self) -> bool:
        return self._stopping.obey()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
