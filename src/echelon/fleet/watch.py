"""Pure: what to do next about a fleet of workers, a state machine over what they say, how they end and the time.

    starting ──ready──► waiting ──go (all are ready)──► training ──done / failed / ended──► accounted for

Nothing here reads a clock, a socket or a process. `Watch` takes events and returns commands; the launcher obeys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from echelon.errors import Bug, EchelonError, Stopped, Timeout, decode
from echelon.fleet.stopping import Progress, Stopping
from echelon.fleet.verdict import Finding, Weight, died, patience_s, reported, root_cause, starter_died

NOTICE_EVERY_S = 10.0
WRITING_S = 600.0  # for a checkpoint that is being written when a worker dies; the writer has the same bound
EXIT_PATIENCE_S = 10.0  # for a process to end after it said that it is done


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Send `message` to every worker that is still there."""

    message: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show `event` to whoever watches."""

    event: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finish:
    """It is over: end whatever still runs; then raise `error`, or return `results` by rank."""

    error: EchelonError | None = None
    results: tuple[dict[str, Any], ...] = ()


Command = Tell | Show | Finish


@dataclass(kw_only=True)
class Watch:
    """The state of one launch. `now` is a monotonic time in seconds, first given as `begun`."""

    workers: int
    begun: float
    finish_s: float
    stopping: Stopping
    progress: Progress = field(default_factory=Progress)
    _ready: set[int] = field(default_factory=set)
    _done: dict[int, dict[str, Any]] = field(default_factory=dict)
    _failed: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)
    _findings: list[Finding] = field(default_factory=list)
    _going: bool = False
    _finish_at: float | None = None  # when the workers that are not done are given up
    _exit_at: float | None = None  # when processes that are done but have not ended are killed
    _notice_at: float = field(init=False)
    _finished: bool = False

    def __post_init__(self) -> None:
        self._notice_at = self.begun + NOTICE_EVERY_S

    # -- events ---------------------------------------------------------------------------------------------------

    def heard(self, rank: int, message: dict[str, Any], now: float) -> list[Command]:
        """A worker said something."""
        commands: list[Command] = []
        kind = message["kind"]
        if kind == "ready":
            self._ready.add(rank)
            if len(self._ready) == self.workers and not self._going:
                self._going = True
                commands.append(Tell(message={"kind": "go"}))
        elif kind == "event":
            if self.progress.note(message["event"]):
                self.stopping.moved(now)
            commands.append(Show(event=message["event"]))
        elif kind == "stop":
            commands += self._ask_to_stop(now)
        elif kind == "done":
            self._done[rank] = {name: value for name, value in message.items() if name != "kind"}
            self._finish_at = self._finish_at or now + self.finish_s
        elif kind == "failed":
            self._failed.add(rank)
            finding = reported(rank, now, _decode(rank, message))
            self._findings.append(finding)
            if finding.weight is Weight.STOPPED:
                self._finish_at = self._finish_at or now + self.finish_s
        else:
            why = f"sent a message of unknown kind {kind!r}"
            self._findings.append(reported(rank, now, Bug(rank, why)))
        return commands + self.tick(now)

    def garbled(self, rank: int, why: str, now: float) -> list[Command]:
        """A worker sent something that is no message."""
        self._failed.add(rank)
        self._findings.append(reported(rank, now, Bug(rank, f"sent what is no message: {why}")))
        return self.tick(now)

    def ended(self, rank: int, status: int | None, now: float, out_of_memory: bool = False) -> list[Command]:
        """A worker's process is gone; everything it said has been heard."""
        commands: list[Command] = []
        self._ended.add(rank)
        if rank not in self._done and rank not in self._failed:
            self._findings.append(died(rank, now, status, out_of_memory, self.progress.way_on()))
        elif rank in self._done and status:
            commands.append(_warning(f"rank {rank} was done but its process did not end well (wait status {status})"))
        return commands + self.tick(now)

    def starter_lost(self, why: str, now: float) -> list[Command]:
        """The process that forks workers is gone."""
        if len(self._done) < self.workers:
            self._findings.append(starter_died(now, why, self.progress.way_on()))
        return self.tick(now)

    def failed(self, error: EchelonError) -> list[Command]:
        """Something that no worker is to blame for went wrong before there were any."""
        return self._finish(Finish(error=error))

    def interrupted(self, number: int, now: float) -> list[Command]:
        """A signal: the first asks all to stop, Ctrl-C once more ends them."""
        if self.stopping.insists(number, now):
            return self._finish(Finish(error=self._stopped()))
        return self._ask_to_stop(now) + self.tick(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed: verdicts that are due, bounds that are reached, notices about waiting."""
        for judge in (self._judge_end, self._judge_findings, self._judge_bounds):
            verdict = judge(now)
            if verdict:
                return self._finish(*verdict)
        return self._notices(now)

    def wake_at(self) -> float:
        """When `tick` has to be called at the latest."""
        bounds = [self._exit_at, self._notice_at]
        if self._missing():
            bounds += [self.stopping.bound(self.progress), self._finish_at]
        if self._faults() and len(self._done) < self.workers:
            bounds.append(self._verdict_at())
        return min(bound for bound in bounds if bound is not None)

    # -- decisions ------------------------------------------------------------------------------------------------

    def _judge_end(self, now: float) -> list[Command]:
        """Whether there is nothing left to wait for: all have spoken, and their processes are gone or are given up."""
        if self._missing():
            return []
        self._exit_at = self._exit_at or now + EXIT_PATIENCE_S
        late = set(range(self.workers)) - self._ended
        if late and now < self._exit_at:
            return []
        late_note = [_warning(f"{_ranks(late)} did not end within {EXIT_PATIENCE_S:g} s of being done; killed")]
        verdict = Finish(results=tuple(self._done[rank] for rank in sorted(self._done)))
        if len(self._done) < self.workers:
            verdict = Finish(error=root_cause(self._findings))
        return [*(late_note if late else []), verdict]

    def _judge_findings(self, now: float) -> list[Command]:
        """Whether a failure has been waited out."""
        if self._faults() and len(self._done) < self.workers and now >= self._verdict_at():
            return [Finish(error=root_cause(self._findings))]
        return []

    def _judge_bounds(self, now: float) -> list[Command]:
        """Whether a wait has reached its bound."""
        missing = self._missing()
        stop_at = self.stopping.bound(self.progress)
        if stop_at is not None and now >= stop_at and missing:
            late = _warning(f"{_ranks(missing)} did not stop within {self.stopping.waited_s(now):.3g} s; killed")
            return [late, Finish(error=self._stopped())]
        if self._finish_at is not None and now >= self._finish_at and missing:
            return [Finish(error=Timeout(f"{_ranks(missing)}, when others were done,", self.finish_s))]
        return []

    def _missing(self) -> set[int]:
        """Ranks that have not come to an end of any kind."""
        return set(range(self.workers)) - set(self._done) - self._failed - self._ended

    def _faults(self) -> list[Finding]:
        """Findings that are a reason to end the others. Stopping as asked is none: the others may still be saving."""
        return [finding for finding in self._findings if finding.weight is not Weight.STOPPED]

    def _verdict_at(self) -> float:
        faults = self._faults()
        writes = self.progress.writes and 0 in self._missing()  # what it writes is worth more than a quick end
        return faults[0].at + (WRITING_S if writes else patience_s(faults))

    def _ask_to_stop(self, now: float) -> list[Command]:
        if not self.stopping.ask(now):
            return []
        stopping = Show(event={"event": "stopping"})
        if not self._going:  # nothing has begun, so there is nothing to save
            return self._finish(stopping, Finish(error=self._stopped()))
        return [stopping, Tell(message={"kind": "stop"})]

    def _stopped(self) -> Stopped:
        said = [finding.error for finding in self._findings if isinstance(finding.error, Stopped)]
        return said[0] if said else self.progress.stopped()

    def _notices(self, now: float) -> list[Command]:
        if now < self._notice_at:
            return []
        self._notice_at = now + NOTICE_EVERY_S
        waited = f"{now - self.begun:.0f} s"
        if not self._going:
            missing = set(range(self.workers)) - self._ready
            return [_waiting(f"after {waited} {_ranks(missing)} not ready yet: still starting or importing the job")]
        stop_at = self.stopping.bound(self.progress)
        if stop_at is not None and self._missing():
            what = "to finish the step and save it" if self.progress.computed else "to stop"
            limit = f"for {stop_at - now:.0f} s more at most"
            return [_waiting(f"for {_ranks(self._missing())} {what}, {limit}; Ctrl-C again ends it at once")]
        if self._done and len(self._done) < self.workers:
            return [_waiting(f"{_ranks(set(range(self.workers)) - set(self._done))} not done yet, the others are")]
        return []

    def _finish(self, *commands: Command) -> list[Command]:
        """Says it once: whatever happens after the end changes nothing."""
        if self._finished:
            return []
        self._finished = True
        return list(commands)


def _decode(rank: int, message: dict[str, Any]) -> EchelonError:
    try:
        return decode(message["error"])
    except (KeyError, TypeError, AttributeError, ValueError):
        return Bug(rank, f"reported a failure that cannot be read: {str(message)[:200]}")


def _warning(message: str) -> Show:
    return Show(event={"event": "warning", "message": message})


def _waiting(message: str) -> Show:
    return Show(event={"event": "waiting", "message": message})


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
