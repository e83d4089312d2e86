"""Summing gradients over slices and workers while backward runs: in floating point, or exactly.

What each worker found in a bucket travels in the tail, so that a gradient that is no number is told before anything is
applied: in exact mode its largest magnitude, from which the next grid follows, too. Without exact mode a GPU is not
asked, since waiting for its answer would empty its queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from echelon.agree import grid
from echelon.agree.buckets import Arrivals, Bucket, plan_buckets
from echelon.agree.kernel import is_plain, load_kernel, sizes_of
from echelon.agree.tail import Agreed
from echelon.comm import Group, Pending

TailNumel = Callable[[torch.dtype, int], int]
"""How long the tail is, by the type it travels in and how many extras each rank has."""


class Summation(Protocol):
    """Called in this order: `open` once a step, `watch` around each backward, `close` once all is sent."""

    buckets: list[Bucket]
    extras: int

    @property
    def tail(self) -> Tensor: ...

    def open(self, write_tail: WriteTail) -> None: ...

    def watch(self, last: bool) -> AbstractContextManager[None]: ...

    def close(self) -> None: ...

    def mine(self) -> list[float]: ...

    def takes(self, largest: float) -> bool: ...

    def misfit(self, agreed: Agreed) -> str | None: ...

    def finish(self, weight: float | None, agreed: Agreed) -> None: ...


class WriteTail(Protocol):
    """Called when the last bucket is about to be sent; `pending_bytes` is what sending it will add to the meter."""

    def __call__(self, pending_bytes: int) -> None: ...


class _Summation:
    """What both ways share: buckets in a fixed order, sent as they fill, the tail in the last one."""

    extras = 0

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: Group, wire: torch.dtype | None, tail_numel: TailNumel
    ) -> None:
        plans = plan_buckets(parameters)
        self._group = group
        self.extras = len(plans) if wire or group.device.type == "cpu" else 0
        wire_of_last = wire or plans[-1].dtype
        self.buckets = [
            Bucket(
                plan,
                parameters,
                wire,
                tail_numel(wire_of_last, self.extras) if index == len(plans) - 1 else 0,
                packs=group.size > 1 or wire is not None,
            )
            for index, plan in enumerate(plans)
        ]
        self._largest = [0.0] * self.extras
        self._sent: list[Pending] = []
        self._write_tail: WriteTail | None = None
        self._last = False
        self._arrivals = Arrivals(self.buckets, [plan.names for plan in plans], self._full)

    @property
    def tail(self) -> Tensor:
        return self.buckets[-1].tail

    def open(self, write_tail: WriteTail) -> None:
        self._write_tail = write_tail
        self._sent = []
        self._largest = [0.0] * self.extras
        for bucket in self.buckets:
            bucket.clear()
            bucket.present = [False] * len(bucket.parameters)

    def mine(self) -> list[float]:
        """What this worker found in each bucket."""
        return self._largest

    def _full(self, index: int) -> None:
        raise NotImplementedError

    def _send(self, index: int) -> None:
        bucket = self.buckets[index]
        if index == len(self.buckets) - 1:
            assert self._write_tail is not None
            self._write_tail(self._group.meter.cost("all_reduce", bucket.wire))
        self._sent.append(self._group.sum(bucket.wire, f"the gradients' all-reduce, bucket {index}"))

    def close(self) -> None:
        """Wait until every bucket is summed."""
        for pending in self._sent:
            pending.wait()
        self._sent = []

    def detach(self) -> None:
        self._arrivals.close()


class FloatSum(_Summation):
    """Sums in floating point. Slices accumulate in `.grad`; buckets leave during the last backward."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group, tail_numel: TailNumel) -> None:
        super().__init__(parameters, group, None, tail_numel)

    @contextmanager
    def watch(self, last: bool) -> Iterator[None]:
        if not last:
            yield
            return
        with self._arrivals.watch():
            yield

    def _full(self, index: int) -> None:
        bucket = self.buckets[index]
        if self._group.size > 1:
            bucket.pack()
            values = [bucket.flat[: bucket.plan.numel]]
        else:
            values = [parameter.grad for parameter in bucket.parameters if parameter.grad is not None]
            bucket.present = [parameter.grad is not None for parameter in bucket.parameters]
        if self.extras:
            self._largest[index] = not_finite(values)
        self._send(index)

    def takes(self, largest: float) -> bool:
        return math.isfinite(largest)

    def misfit(self, _agreed: Agreed) -> str | None:
        return None

    def finish(self, weight: float | None, agreed: Agreed) -> None:
        """Leave the mean in `.grad`. `weight` None: the gradients were scaled before they were summed."""
        start = 0
        for bucket in self.buckets:
            stop = start + len(bucket.parameters)
            present = agreed.present[start:stop]
            start = stop
            if self._group.size > 1:
                if weight is not None:
                    bucket.flat[: bucket.plan.numel].div_(weight)
                bucket.hand_back(present)
            elif weight is not None:
                torch._foreach_div_([p.grad for p in bucket.parameters if p.grad is not None], weight)


class GridSum(_Summation):
    """Sums exactly (grid.py). Every slice's gradients are rounded and added as soon as their bucket is full."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: Group, tail_numel: TailNumel, slices: int
    ) -> None:
        super().__init__(parameters, group, torch.float64, tail_numel)
        self._slices = slices
        self._kernel = load_kernel()
        self._sizes = [sizes_of(bucket.parameters) for bucket in self.buckets]
        self.k = [grid.FIRST_K] * len(self.buckets)
        self._first = True

    def open(self, write_tail: WriteTail) -> None:
        super().open(write_tail)
        self._first = True

    @contextmanager
    def watch(self, last: bool) -> Iterator[None]:
        self._last = last
        with self._arrivals.watch():
            yield
        self._first = False

    def _full(self, index: int) -> None:
        bucket = self.buckets[index]
        total = bucket.wire[: bucket.plan.numel]
        self._largest[index] = _larger(self._largest[index], self._add(index, bucket, total))
        bucket.clear()
        if self._last:
            self._send(index)

    def _add(self, index: int, bucket: Bucket, total: Tensor) -> float:
        """Add the gradients of a slice to the integer total; the largest magnitude among them."""
        if self._kernel is not None:
            gradients = bucket.gradients()
            if all(gradient is None or is_plain(gradient) for gradient in gradients):
                return self._kernel.add_to_grid(gradients, self._sizes[index], self.k[index], total, self._first)
        bucket.pack()
        values = bucket.flat[: bucket.plan.numel]
        largest = grid.largest_magnitude(values)
        grid.add_to_grid(values, self.k[index], total, self._first)
        return largest

    def takes(self, largest: float) -> bool:
        return grid.has_grid(largest, self._slices)

    def misfit(self, agreed: Agreed) -> str | None:
        """Why the step must be computed again, if it must; the next k of every bucket is set either way."""
        largest = [float(x) for x in agreed.extras.max(axis=0)]
        misfits = [
            i for i, (k, top) in enumerate(zip(self.k, largest, strict=True)) if not grid.fits(k, top, self._slices)
        ]
        if misfits:
            for index in misfits:
                self.k[index] = grid.next_k(self.k[index], largest[index])
            return f"exact sums need another grid for {len(misfits)} of {len(self.k)} buckets"
        return None

    def finish(self, weight: float | None, agreed: Agreed) -> None:
        assert weight is not None
        start = 0
        for index, bucket in enumerate(self.buckets):
            size = bucket.plan.numel
            mean = self._kernel if self._kernel is not None and is_plain(bucket.flat) else grid
            mean.from_grid(bucket.wire[:size], self.k[index], weight, bucket.flat[:size])
            bucket.hand_back(agreed.present[start : start + len(bucket.parameters)])
            start += len(bucket.parameters)
        largest = agreed.extras.max(axis=0)
        self.k = [grid.next_k(k, float(top)) for k, top in zip(self.k, largest, strict=True)]


def not_finite(values: Sequence[Tensor]) -> float:
    """NaN or infinity if there is one in the tensors, else 0. One look at their sum, as long as that is finite."""
    if all(math.isfinite(abs(tensor.sum().item())) for tensor in values):
        return 0.0
    found = [grid.largest_magnitude(torch.view_as_real(t) if t.is_complex() else t) for t in values]
    return next((largest for largest in found if not math.isfinite(largest)), 0.0)


def _larger(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a
