"""The step's tail: what workers must agree on, carried at the end of the last bucket, not in a message of its own.

Every number has a place that exactly one worker fills; the others leave zero there, and a sum with zeros is exact. A
double travels as three float32 parts (24 bits each), as one float64, or, on an int64 wire, as its bits.

    | loss, weight of slice 0 .. S-1 | flags, bytes, extras of rank 0 .. R-1 | presence of parameters | rows |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor


class Flag(IntFlag):
    """What a worker says of its step."""

    STOP = 1
    MEANS = 2
    SUMS = 4
    BUFFERS = 8


@dataclass(frozen=True, kw_only=True)
class TailShape:
    """How long each part is. `extras`: numbers of each rank (exact mode's maxima). `rows`: BatchNorm's matrix."""

    slices: int
    ranks: int
    extras: int
    parameters: int
    rows: int
    row_width: int

    @property
    def doubles(self) -> int:
        return 2 * self.slices + self.ranks * (2 + self.extras)

    def numel(self, wire: torch.dtype) -> int:
        return self.doubles * parts(wire) + self.parameters + self.rows * self.row_width


def parts(wire: torch.dtype) -> int:
    return 3 if wire == torch.float32 else 1


@dataclass(kw_only=True)
class Tail:
    """One worker's entries before the sum, everybody's after it. Numbers may still be on their way from a GPU."""

    losses: list[tuple[int, Tensor | float, Tensor | float]]
    flags: int
    sent_bytes: int
    extras: Sequence[float]
    present: Sequence[bool]
    rows: Tensor


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The tail after the sum: the same on every worker."""

    losses: tuple[tuple[float, float], ...]
    flags: tuple[int, ...]
    sent_bytes: int
    extras: np.ndarray
    present: tuple[bool, ...]
    rows: Tensor


def write(tail: Tail, shape: TailShape, rank: int, into: Tensor) -> None:
    """Fill this worker's places of the flat tail `into`, zero elsewhere."""
    doubles = np.zeros(shape.doubles)
    on_device = [x for _, *pair in tail.losses for x in pair if isinstance(x, Tensor) and x.device.type != "cpu"]
    for index, total, weight in tail.losses:
        doubles[2 * index : 2 * index + 2] = [_number(total), _number(weight)]
    start = 2 * shape.slices + rank * (2 + shape.extras)
    doubles[start : start + 2 + shape.extras] = [tail.flags, tail.sent_bytes, *tail.extras]
    values = torch.from_numpy(doubles)
    if on_device:
        values = _with_device_losses(values.to(into.device), tail)
    _encode(values, into[: shape.doubles * parts(into.dtype)])
    rest = into[shape.doubles * parts(into.dtype) :]
    rest[: shape.parameters].copy_(torch.tensor(tail.present, dtype=torch.float32))
    if shape.rows:
        bits = tail.rows.flatten()
        rest[shape.parameters :].copy_(bits.view(torch.int32) if into.dtype == torch.int64 else bits)


def read(shape: TailShape, summed: Tensor) -> Agreed:
    """Everybody's entries from the summed tail. Waits for the device, once."""
    wire = summed.dtype
    width = shape.doubles * parts(wire)
    host = summed[: width + shape.parameters].cpu()
    doubles = _decode(host[:width])
    by_rank = doubles[2 * shape.slices :].reshape(shape.ranks, 2 + shape.extras)
    rows = summed[width + shape.parameters :]
    if wire == torch.int64:
        rows = rows.to(torch.int32).view(torch.float32)
    return Agreed(
        losses=tuple((float(a), float(b)) for a, b in doubles[: 2 * shape.slices].reshape(-1, 2)),
        flags=tuple(int(flag) for flag in by_rank[:, 0]),
        sent_bytes=int(by_rank[:, 1].sum()),
        extras=by_rank[:, 2:],
        present=tuple((host[width:] > 0).tolist()),
        rows=rows.reshape(shape.rows, shape.row_width) if shape.rows else rows,
    )


def _number(value: Tensor | float) -> float:
    if isinstance(value, Tensor):
        return 0.0 if value.device.type != "cpu" else value.item()
    return value


def _with_device_losses(values: Tensor, tail: Tail) -> Tensor:
    """Put losses that live on a GPU in their places without waiting for them."""
    places, numbers = [], []
    for index, *pair in tail.losses:
        for offset, number in enumerate(pair):
            if isinstance(number, Tensor) and number.device.type != "cpu":
                places.append(2 * index + offset)
                numbers.append(number.detach().reshape(()).double())
    values[torch.tensor(places, device=values.device)] = torch.stack(numbers)
    return values


def _encode(values: Tensor, into: Tensor) -> None:
    if into.dtype == torch.int64:
        into.copy_(values.view(torch.int64))
    elif into.dtype == torch.float64:
        into.copy_(values)
    else:
        high = values.float()
        middle = (values - high.double()).float()
        low = (values - high.double() - middle.double()).float()
        into.copy_(torch.stack((high, middle, low), dim=1).flatten())


def _decode(summed: Tensor) -> np.ndarray:
    if summed.dtype == torch.int64:
        return summed.view(torch.float64).numpy()
    if summed.dtype == torch.float64:
        return summed.numpy()
    return summed.reshape(-1, 3).double().sum(dim=1).numpy()
