"""What a commit came to. Every worker gets the same outcome of the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from echelon.slices import Step
from echelon.state import State

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.layout import StepResult


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The update was applied on every worker. `norm` is the gradient's norm before clipping, where one was taken."""

    loss: float
    weight: float
    losses: tuple[tuple[float, float], ...]
    sent_bytes: int
    stop: bool
    norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Nothing was applied anywhere: the step's total weight is 0. The step is committed and counts."""

    reason: str
    losses: tuple[tuple[float, float], ...]
    sent_bytes: int
    stop: bool
    loss: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Again:
    """Nothing was applied anywhere and the step is to be computed again (exact mode's grid did not fit the
    gradients).
    """

    reason: str


Outcome = Applied | Skipped | Again


class Agreement(Protocol):
    """Called by the loop in this order: begin, window (around each backward), commit. Between steps: export, restore.
    A loop of the user's own calls `prepare` before commit, and may look at the agreed gradients in between.

    `begin` is given the result that the executor fills while it runs, and asks `stop` when the last bucket leaves.
    """

    def begin(self, step: Step, /, result: StepResult, stop: Callable[[], bool]) -> None: ...

    def window(self, last: bool) -> AbstractContextManager[None]: ...

    def prepare(self, step: Step, shares: Sequence[range]) -> Again | None: ...

    def commit(self, step: Step, shares: Sequence[range]) -> Outcome: ...

    def export(self) -> State: ...

    def restore(self, state: State) -> None: ...
