"""Pure: the one cause to report, from everything that workers said and everything that happened to them.

One fault makes every worker fail, most of them with a symptom ("a peer was lost"). What is said first is seldom the
cause, so findings are weighed, and better ones are waited for a little.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from echelon.errors import Bug, EchelonError, PeerLost, Stopped, Timeout, TooFewWorkers, UserError

PATIENCE_S = 1.5  # a peer notices a lost connection in milliseconds, a dying process may take a second to be gone
SETTLING_S = 0.25  # once a cause is known: what happened at the same moment may still have to arrive
SAME_MOMENT_S = 0.1  # deaths and messages come over different channels; closer than this their order means nothing

# Signals that no failure of a peer leads to. SIGABRT is not among them: libraries abort when a connection breaks.
FIRST_CAUSES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})

REASONS = {
    signal.SIGSEGV: "native code crashed: an extension or a library that does not fit this machine",
    signal.SIGBUS: "native code crashed, or shared memory (/dev/shm) or a mapped file ran out of space",
    signal.SIGILL: "native code used an instruction that this processor does not have",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGABRT: "a library gave up; its message is above",
}


class Weight(IntEnum):
    """How much a finding explains; the lightest explanation that was found is the one reported."""

    CAUSE = 0  # a typed error that says itself what went wrong
    KILLED = 1  # ended by a signal
    LEFT = 2  # ended by an exit of its own, without a word
    BUG = 3  # an exception nobody expected: may well be a symptom of a lost peer
    STOPPED = 4  # stopped as asked
    SYMPTOM = 5  # lost a peer or ran into a bound


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that went wrong with one worker; `at` is the time at which the launcher learnt of it."""

    rank: int
    at: float
    weight: Weight
    error: EchelonError
    first_cause: bool = False


def reported(rank: int, at: float, error: EchelonError) -> Finding:
    """What a worker said about its own failure."""
    weight = Weight.CAUSE
    if isinstance(error, (PeerLost, Timeout, TooFewWorkers)):
        weight = Weight.SYMPTOM
    elif isinstance(error, Stopped):
        weight = Weight.STOPPED
    elif isinstance(error, Bug):
        weight = Weight.BUG
    return Finding(rank=rank, at=at, weight=weight, error=error)


def died(rank: int, at: float, status: int | None, out_of_memory: bool, way_on: str) -> Finding:
    """What the end of a process says that had not finished; `status` as `waitpid` gives it, None when nobody knows.
    `way_on` is what to do next.
    """
    if status is None:
        error: EchelonError = TooFewWorkers(f"rank {rank} ended and left no exit status; {way_on}")
        return Finding(rank=rank, at=at, weight=Weight.KILLED, error=error)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        error = UserError(
            rank,
            f"the worker process ended with exit code {code} before it had finished: "
            "something in the job, or a library it uses, called exit or os._exit",
        )
        return Finding(rank=rank, at=at, weight=Weight.LEFT, error=error)
    error = TooFewWorkers(f"rank {rank} was ended by {_name(-code)}: {_reason(-code, out_of_memory)}; {way_on}")
    return Finding(rank=rank, at=at, weight=Weight.KILLED, error=error, first_cause=-code in FIRST_CAUSES)


def starter_died(at: float, why: str, way_on: str) -> Finding:
    """The process that forks the workers is gone, and they with it."""
    error = TooFewWorkers(f"the process that starts the workers {why}, and they ended with it; {way_on}")
    return Finding(rank=-1, at=at, weight=Weight.KILLED, error=error, first_cause=True)


def patience_s(findings: Sequence[Finding]) -> float:
    """How long after the first finding a better explanation is worth waiting for."""
    settled = any(f.weight is Weight.CAUSE or f.first_cause for f in findings)
    return SETTLING_S if settled else PATIENCE_S


def root_cause(findings: Sequence[Finding]) -> EchelonError:
    """The error to raise. Equal errors of several ranks are reported for the lowest of them.

    A typed error explains more than a death, unless the death came first: user code that talks to its peers itself
    raises when one of them is killed, but nothing a worker raises kills another by SIGKILL or a crash.
    """
    first = min(findings, key=lambda f: (f.weight, _vagueness(f.error), f.at))
    if first.weight is Weight.CAUSE:
        before = [f for f in findings if f.first_cause and f.at <= first.at + SAME_MOMENT_S]
        first = min(before, key=lambda f: f.at, default=first)
    alike = [f for f in findings if _same(f.error, first.error)]
    return min(alike, key=lambda f: f.rank, default=first).error


def _vagueness(error: EchelonError) -> int:
    """Among symptoms: one that names the lost rank says more than one that does not, and that more than a timeout."""
    if isinstance(error, PeerLost):
        return 1 if error.rank >= 0 else 2
    return 3 if isinstance(error, Timeout) else 0


def _same(one: EchelonError, other: EchelonError) -> bool:
    def what(error: EchelonError) -> dict[str, object]:
        return {name: value for name, value in error.fields.items() if name not in ("rank", "trace")}

    return type(one) is type(other) and what(one) == what(other) and not isinstance(one, PeerLost)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reason(number: int, out_of_memory: bool) -> str:
    if number == signal.SIGKILL:
        if out_of_memory:
            return "the machine ran out of memory and the kernel killed it; use fewer workers or smaller slices"
        return "out of memory (the kernel kills without a word), or killed by hand"
    return next((reason for known, reason in REASONS.items() if known == number), "it was ended from outside")
