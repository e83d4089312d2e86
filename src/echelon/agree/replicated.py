"""Replicated agreement: every worker holds the whole model, gradients are summed over all of them, all apply the same
update.

Commit has two phases. Prepare: gradients are summed, and with the last bucket every worker's losses, weights and
flags, so that all know the same outcome. Apply: each applies it. A worker that dies in between changes nothing:
either somebody saw the outcome, and has the new state to give to those that did not, or nobody did, and the step is
computed again.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.agree.changes import share_changes
from echelon.agree.finite import check_finite
from echelon.agree.outcome import Again, Applied, Outcome, Skipped
from echelon.agree.summation import FloatSum, GridSum
from echelon.agree.tail import Agreed, Flag, Tail, TailShape, of_one, read, write
from echelon.agree.update import Update
from echelon.comm import Group
from echelon.errors import ConfigError, UserError
from echelon.layout import RunningStatistics, StepResult, parameters_of, persistent_buffers
from echelon.layout.whole import MIXED_LOSS
from echelon.slices import Step
from echelon.state import State

Probe = Callable[[Step, Mapping[str, Tensor]], None]
"""Looks at the agreed mean gradients before they are clipped and applied (verify does)."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A step between its two phases."""

    agreed: Agreed
    flags: int
    weight: float


class Replicated:
    """One worker's part of the agreement."""

    def __init__(
        self,
        module: nn.Module,
        update: Update,
        statistics: RunningStatistics,
        group: Group,
        *,
        slices: int,
        exact: bool,
        probe: Probe | None = None,
    ) -> None:
        self._module = module
        self._parameters = parameters_of(module)
        self._update = update
        self._statistics = statistics
        self._group = group
        self._slices = slices
        self._probe = probe
        self.committed = 0
        self._sent_before = 0
        self._result = StepResult()
        self._stop: Callable[[], bool] = lambda: False
        self._alone: Agreed | None = None
        self._prepared: _Prepared | None = None
        if exact:
            self._sum: FloatSum | GridSum = GridSum(self._parameters, group, self._tail_numel, slices)
        else:
            self._sum = FloatSum(self._parameters, group, self._tail_numel)
        self._shape = self._tail_shape(self._sum.extras)
        self._order = [name for bucket in self._sum.buckets for name in bucket.plan.names]

    def _tail_shape(self, extras: int) -> TailShape:
        return TailShape(
            slices=self._slices,
            ranks=self._group.size,
            extras=extras,
            parameters=len(self._parameters),
            rows=len(self._statistics.rows),
            row_width=self._statistics.width,
            wide_rows=self._statistics.rows.dtype == torch.float64,
        )

    def _tail_numel(self, wire: torch.dtype, extras: int) -> int:
        return self._tail_shape(extras).numel(wire) if self._group.size > 1 else 0

    def begin(self, _step: Step, result: StepResult, stop: Callable[[], bool]) -> None:
        """Open the step. `result` is filled by the executor while it runs; `stop` is asked when the last bucket
        leaves.
        """
        self._result = result
        self._stop = stop
        self._prepared = None
        self._sum.open(self._write_tail)

    def window(self, last: bool) -> AbstractContextManager[None]:
        return self._sum.watch(last)

    def _write_tail(self, pending_bytes: int) -> None:
        flags = Flag.STOP if self._stop() else 0
        if self._result.means is not None:
            flags |= Flag.MEANS if self._result.means else Flag.SUMS
        if self._result.changed:
            flags |= Flag.CHANGED
        tail = Tail(
            losses=[(loss.index, loss.total, loss.weight) for loss in self._result.losses],
            flags=flags,
            sent_bytes=self._group.meter.begun_bytes + pending_bytes - self._sent_before,
            extras=self._sum.mine(),
            present=[there for bucket in self._sum.buckets for there in bucket.present],
            rows=self._statistics.rows,
        )
        self._sent_before = self._group.meter.begun_bytes + pending_bytes
        if self._group.size == 1:
            self._alone = of_one(tail, self._shape)
        else:
            write(tail, self._shape, self._group.rank, self._sum.tail)

    def prepare(self, step: Step, shares: Sequence[range]) -> Again | None:
        """The first phase. After it every worker knows the outcome, and the gradients are the agreed mean, unless the
        step is to be computed again or its weight is 0.
        """
        self._sum.close()
        agreed = self._alone or read(self._shape, self._sum.tail)
        flags = functools.reduce(operator.or_, agreed.flags)
        if flags & Flag.MEANS and flags & Flag.SUMS:
            raise UserError(self._group.rank, MIXED_LOSS)
        check_finite(step, agreed, shares, self._sum, self._group.rank)
        misfit = self._sum.misfit(agreed)
        if misfit:
            return Again(reason=misfit)
        weight = math.fsum(w for _, w in agreed.losses)
        if weight:
            scaled_already = flags & Flag.MEANS and isinstance(self._sum, FloatSum)
            self._sum.finish(None if scaled_already else weight, agreed)
            if self._probe:
                self._probe(step, {name: p.grad for name, p in self._parameters.items() if p.grad is not None})
        self._prepared = _Prepared(agreed=agreed, flags=flags, weight=weight)
        return None

    def commit(self, step: Step, shares: Sequence[range]) -> Outcome:
        """Agree, if that is still to be done, then apply one update on every worker or nothing anywhere."""
        again = self.prepare(step, shares) if self._prepared is None else None
        if again is not None:
            return again
        assert self._prepared is not None
        ready, self._prepared = self._prepared, None
        agreed, stop = ready.agreed, bool(ready.flags & Flag.STOP)
        if not ready.weight:
            return self._skip(agreed, stop)
        norm = self._update.apply()
        self._settle(agreed, bool(ready.flags & Flag.CHANGED))
        return Applied(
            loss=total_loss(agreed.losses) / ready.weight,
            weight=ready.weight,
            losses=agreed.losses,
            sent_bytes=agreed.sent_bytes,
            stop=stop,
            norm=norm,
        )

    def _skip(self, agreed: Agreed, stop: bool) -> Skipped:
        self._update.skip()
        self.committed += 1
        return Skipped(reason="the total weight is 0", losses=agreed.losses, sent_bytes=agreed.sent_bytes, stop=stop)

    def _settle(self, agreed: Agreed, changed: bool) -> None:
        if self._statistics:
            self._statistics.apply(agreed.rows)
        if changed:
            share_changes(self._module, self._result.changed, self._group)
        self.committed += 1

    def export(self) -> State:
        """Everything that must outlive this worker, by name."""
        state = State(step=self.committed)
        for name, parameter in self._module.named_parameters():
            state.tensors[f"model/{name}"] = parameter.detach()
        for name, buffer in persistent_buffers(self._module).items():
            state.tensors[f"model/{name}"] = buffer
        self._update.export(state)
        if isinstance(self._sum, GridSum):
            state.values["grid"] = list(self._sum.k)
        return state

    def restore(self, state: State) -> None:
        """Become the worker that exported `state`."""
        mine = {**dict(self._module.named_parameters()), **persistent_buffers(self._module)}
        saved = {path.removeprefix("model/"): t for path, t in state.tensors.items() if path.startswith("model/")}
        for name in sorted(mine.keys() | saved.keys()):
            if name not in saved or name not in mine or _kind(saved[name]) != _kind(mine[name]):
                raise ConfigError(
                    "model",
                    f"the checkpoint does not fit: {_difference(name, mine, saved)}; start anew with another --out",
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(saved[name])
        self._update.restore(state)
        if isinstance(self._sum, GridSum):
            self._sum.k = list(state.values.get("grid") or self._sum.k)
        self.committed = state.step

    def without_gradient(self) -> list[str]:
        """Parameters that had no gradient in the step just committed."""
        return [name for name, parameter in self._parameters.items() if parameter.grad is None]

    def detach(self) -> None:
        """Give the parameters back as they were: no hooks, no buffers."""
        self._sum.detach()


def total_loss(losses: Sequence[tuple[float, float]]) -> float:
    """Losses are added in slice order."""
    total = 0.0
    for loss, _ in losses:
        total += loss
    return total


def _difference(name: str, mine: dict[str, Tensor], saved: dict[str, Tensor]) -> str:
    if name not in saved:
        return f"{name} is not in it"
    if name not in mine:
        return f"the model has no {name}"
    return f"{name} is {_kind(saved[name])} there and {_kind(mine[name])} in the model"


def _kind(tensor: Tensor) -> str:
    """What must be alike to go on: copied into another dtype, weights would be others without a word."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
