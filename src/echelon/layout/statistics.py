"""BatchNorm's running statistics, kept by slice and applied in slice order, so that they do not depend on who
computed what.

A running statistic follows r <- (1 - m) r + m x for every batch x. Every slice starts from the committed r0, and its c
forward passes lead to r1; from any other r they would have led to r1 + (1 - m)^c (r - r0). So r1 and c travel to all
workers (one row a slice), and commit applies the rows in slice order by that formula. With momentum None (a cumulative
average of N batches, N0 of them at the start) it is ((N r - N0 r0) + (N0 + c) r1) / (N + c).

A forward in eval mode inside a slice reads what a single process would: the committed values and the slice's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.slices import Course

# InstanceNorm is not among them: it does not count its batches, so that nobody knows how often it ran in a slice.
TRACKING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def normalises_by_batch(module: nn.Module) -> bool:
    """Whether the samples that are computed together change each other's results, tracked or not."""
    return any(isinstance(child, _BatchNorm) for child in module.modules())


def too_small(module: nn.Module, course: Course) -> list[str]:
    """A warning where some slice may be too small to be normalised."""
    flat = [name for name, child in module.named_modules() if isinstance(child, nn.BatchNorm1d)]
    if not flat or course.smallest_slice > 1:
        return []
    last = course.size % course.batch or min(course.batch, course.size)
    why = f"{last} samples in {course.slices} slices leave one sample in some"
    return [f"{flat[0]} is BatchNorm1d, which fails on a single sample, and {why}; use fewer slices or other batches"]


def _follows_the_rule(child: nn.Module) -> bool:
    """A subclass with a forward of its own may do anything to its statistics."""
    return isinstance(child, TRACKING) and type(child).forward is _BatchNorm.forward


class RunningStatistics:
    """The running statistics of one model. Between steps its buffers hold the committed values."""

    def __init__(self, module: nn.Module, slices: int) -> None:
        found = {
            name: child
            for name, child in module.named_modules()
            if _follows_the_rule(child) and child.running_mean is not None and child.num_batches_tracked is not None
        }
        self.names = frozenset(
            f"{name}.{key}" if name else key
            for name in found
            for key in ("running_mean", "running_var", "num_batches_tracked")
        )
        self._norms = list(found.values())
        self._pieces = [
            size for norm in self._norms for size in (norm.running_mean.numel(), norm.running_mean.numel(), 1)
        ]
        self.width = sum(self._pieces)
        ends = list(accumulate(self._pieces))
        self._count_places = [end - 1 for end in ends[2::3]]
        device = self._norms[0].running_mean.device if self._norms else torch.device("cpu")
        wide = any(norm.running_mean.dtype == torch.float64 for norm in self._norms)
        dtype = torch.float64 if wide else torch.float32
        self.rows = torch.zeros(slices if self._norms else 0, self.width, device=device, dtype=dtype)
        self._committed: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._norms)

    def begin(self) -> None:
        """Start a step: remember the committed values, forget the last step's rows."""
        self._committed = [buffer.clone() for norm in self._norms for buffer in _buffers(norm)]
        self.rows.zero_()

    def open(self) -> None:
        """Before a slice's forward: from the committed values, whatever the slice before has left."""
        if self._committed:
            torch._foreach_copy_([buffer for norm in self._norms for buffer in _buffers(norm)], self._committed)

    def close(self, index: int) -> None:
        """After a slice's forward: where it led becomes its row."""
        parts = []
        for norm, before in zip(self._norms, self._committed[2::3], strict=True):
            passes = norm.num_batches_tracked - before
            parts += [norm.running_mean, norm.running_var, passes.to(norm.running_mean.dtype).reshape(1)]
        self.rows[index].copy_(torch.cat(parts))

    def end(self) -> None:
        """After the last slice: put the committed values back. Once: what is committed later stays."""
        committed, self._committed = self._committed, []
        if committed:
            torch._foreach_copy_([buffer for norm in self._norms for buffer in _buffers(norm)], committed)

    def apply(self, rows: Tensor) -> None:
        """Commit every slice's statistics, in slice order."""
        counts = rows[:, self._count_places].tolist()  # all at once: each look at a GPU's memory waits for it
        begun = {norm: [buffer.clone() for buffer in _buffers(norm)] for norm in self._norms}
        for row, passes in zip(rows, counts, strict=True):
            parts = row.split(self._pieces)
            running, start, factors, ends = [], [], [], []
            for norm, count, mean, var in zip(self._norms, passes, parts[::3], parts[1::3], strict=True):
                if count and norm.momentum is None:
                    _average(norm, begun[norm], (mean, var), count)
                elif count:
                    running += [norm.running_mean, norm.running_var]
                    start += begun[norm][:2]
                    factors += [(1.0 - norm.momentum) ** count] * 2
                    ends += [mean.to(norm.running_mean.dtype), var.to(norm.running_var.dtype)]
            if running:
                apart = torch._foreach_sub(running, start)
                _multiply(apart, factors)
                torch._foreach_add_(apart, ends)
                torch._foreach_copy_(running, apart)
            for norm, count in zip(self._norms, passes, strict=True):
                norm.num_batches_tracked.add_(int(count))


def _buffers(norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def _multiply(tensors: Sequence[Tensor], factors: list[float]) -> None:
    """All at once; but for half precision, to which torch would round the factors first."""
    if all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors):
        torch._foreach_mul_(list(tensors), factors)
        return
    for tensor, factor in zip(tensors, factors, strict=True):
        tensor.mul_(factor)


def _average(norm: Any, begun: list[Tensor], ends: tuple[Tensor, Tensor], count: float) -> None:
    """The cumulative average: `count` more batches beside those that are counted already."""
    before, first = int(norm.num_batches_tracked), int(begun[2])
    for running, start, end in zip((norm.running_mean, norm.running_var), begun[:2], ends, strict=True):
        grown = running * before - start * first + end.to(running.dtype) * (first + count)
        running.copy_(grown / (before + count))
