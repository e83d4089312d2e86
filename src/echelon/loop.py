"""The training loop. It asks nothing about parallelism: a step is begun, computed, committed.

    partition data     steps: which slices exist, and which are this worker's
    forward, backward  executor.run: this worker's slices, under the agreement's window
    aggregate, update  agreement.commit: one update on every worker, or nothing anywhere
    repeat             until the steps are done or somebody asked to stop

The six steps of data-parallel training, one line each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from echelon.agree import Again, Agreement, Applied, Skipped
from echelon.layout import StepResult, Window
from echelon.slices import Step


class Executor(Protocol):
    """Turns this worker's slices into local gradients, and writes what it computed into the result."""

    def run(self, step: Step, mine: range, window: Window, result: StepResult) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One committed step, as every worker knows it. `seconds` is from the commit before (or the first begin) to this
    one.
    """

    step: Step
    outcome: Applied | Skipped
    shares: tuple[range, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A step and who computes which of its slices."""

    step: Step
    shares: tuple[range, ...]


def train(
    executor: Executor,
    agreement: Agreement,
    turns: Iterable[Turn],
    rank: int,
    stop: Callable[[], bool],
    after: Sequence[Callable[[StepDone], None]],
) -> bool:
    """Run the steps; call everything in `after` once a step is committed. True if somebody asked to stop."""
    before = time.perf_counter()
    for turn in turns:
        outcome: Applied | Skipped | Again = Again(reason="not computed yet")
        while isinstance(outcome, Again):
            result = StepResult()
            agreement.begin(turn.step, result, stop)
            executor.run(turn.step, turn.shares[rank], agreement.window, result)
            outcome = agreement.commit(turn.step, turn.shares)
        now = time.perf_counter()
        done = StepDone(step=turn.step, outcome=outcome, shares=turn.shares, seconds=now - before)
        before = now
        for duty in after:
            duty(done)
        if outcome.stop:
            return True
    return False
