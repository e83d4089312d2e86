"""Several workers in one process, one step at a time: real parts, a group whose sums wait until all have spoken.

What each does is what a process of its own would do, so equality of bits can be tested over hundreds of layouts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from echelon.agree import Again, Applied, Skipped
from echelon.assemble import Parts, assemble, prepare
from echelon.checkpoint import digest
from echelon.comm.meter import RingMeter
from echelon.job import Job
from echelon.layout import StepResult, model_tensors
from echelon.plan import Plan
from echelon.slices import assign
from echelon.state import State


class Summed:
    """By the time anybody waits, everybody has spoken."""

    def wait(self) -> None:
        pass


class LockstepGroup:
    """One rank of a group that lives in this process."""

    device = torch.device("cpu")

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.meter = RingMeter(size, "nowhere")
        self.waiting: list[torch.Tensor] = []

    def sum(self, tensor: torch.Tensor, during: str) -> Summed:
        self.meter.begin("all_reduce", tensor)
        self.waiting.append(tensor)
        return Summed()

    def broadcast(self, tensor: torch.Tensor, during: str) -> None:
        raise AssertionError("nothing is broadcast in these tests")


class Fleet:
    """`workers` copies of a job's parts. Shares may be given; otherwise they are equal."""

    def __init__(self, make_job: Callable[[], Job], workers: int, *, exact: bool = True, merge: bool = True) -> None:
        self.groups = [LockstepGroup(rank, workers) for rank in range(workers)]
        self.parts: list[Parts] = []
        for group in self.groups:
            prepared = prepare(make_job(), Plan(), workers=workers, device=group.device, exact=exact, merge=merge)
            self.parts.append(assemble(prepared, group))  # type: ignore[arg-type]
        self.slices = prepared.job.slices
        self.total = self.parts[0].course.total

    def attempt(self, number: int, shares: Sequence[range]) -> list[Any]:
        """What each worker's commit came to."""
        step = self.parts[0].course.step(number)
        for rank, parts in enumerate(self.parts):
            result = StepResult()
            parts.agreement.begin(step, result, lambda: False)
            parts.executor.run(step, shares[rank], parts.agreement.window, result)
        for tensors in zip(*(group.waiting for group in self.groups), strict=True):
            total = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.copy_(total)
        for group in self.groups:
            group.waiting.clear()
        return [parts.agreement.commit(step, shares) for parts in self.parts]

    def step(self, number: int, shares: Sequence[range] | None = None) -> Applied | Skipped:
        shares = shares or assign(self.slices, [1.0] * len(self.parts))
        for _ in range(3):
            outcomes = self.attempt(number, shares)
            assert len({(type(o), getattr(o, "loss", None)) for o in outcomes}) == 1, outcomes
            if not isinstance(outcomes[0], Again):
                return outcomes[0]
        raise AssertionError("no grid was found in three attempts")

    def run(self, start: int = 1, stop: int | None = None) -> Fleet:
        for number in range(start, (stop or self.total) + 1):
            self.step(number)
        return self

    def digest(self) -> str:
        """One digest: every worker holds the same bits."""
        codes = {digest(model_tensors(parts.module)) for parts in self.parts}
        assert len(codes) == 1, "the workers' weights differ"
        return codes.pop()

    def export(self) -> State:
        """A copy of the state, as a checkpoint would hold it."""
        state = self.parts[-1].agreement.export()
        tensors = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
        return State(step=state.step, tensors=tensors, values=copy.deepcopy(state.values))

    def restore(self, state: State) -> Fleet:
        for parts in self.parts:
            tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
            parts.agreement.restore(State(step=state.step, tensors=tensors, values=copy.deepcopy(state.values)))
        return self
