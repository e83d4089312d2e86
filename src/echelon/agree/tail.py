"""The step's tail: what workers must agree on, carried at the end of the last bucket, not in a message of its own.

Every number has a place that exactly one worker fills; the others leave zero there, and a sum with zeros is exact. A
double travels as three float32 parts (24 bits each), or as one float64.

    | loss, weight of slice 0 .. S-1 | flags, bytes, extras of rank 0 .. R-1 | presence of parameters | rows |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor

Doubles = np.ndarray[Any, np.dtype[np.float64]]


class Flag(IntEnum):
    """What a worker says of its step."""

    STOP = 1
    MEANS = 2
    SUMS = 4
    CHANGED = 8


@dataclass(frozen=True, kw_only=True)
class TailShape:
    """How long each part is. `extras`: numbers of each rank (exact mode's maxima). `rows`: BatchNorm's matrix.

    `wide_rows`: the rows are doubles, and travel as such; else they are singles, each one number on any wire.
    """

    slices: int
    ranks: int
    extras: int
    parameters: int
    rows: int
    row_width: int
    wide_rows: bool = False

    @property
    def doubles(self) -> int:
        return 2 * self.slices + self.ranks * (2 + self.extras)

    def numel(self, wire: torch.dtype) -> int:
        return self.doubles * parts(wire) + self.parameters + self.row_numel(wire)

    def row_numel(self, wire: torch.dtype) -> int:
        return self.rows * self.row_width * (parts(wire) if self.wide_rows else 1)


def parts(wire: torch.dtype) -> int:
    return 3 if wire == torch.float32 else 1


@dataclass(kw_only=True)
class Tail:
    """One worker's entries before the sum. A loss may still be on its way from a GPU: `float` waits for it."""

    losses: Sequence[tuple[int, SupportsFloat, SupportsFloat]]
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
    extras: Doubles
    present: tuple[bool, ...]
    rows: Tensor


def write(tail: Tail, shape: TailShape, rank: int, into: Tensor) -> None:
    """Fill this worker's places of the flat tail `into`, zero elsewhere."""
    doubles = np.zeros(shape.doubles)
    for index, total, weight in tail.losses:
        doubles[2 * index : 2 * index + 2] = float(total), float(weight)
    start = 2 * shape.slices + rank * (2 + shape.extras)
    doubles[start : start + 2 + shape.extras] = (tail.flags, tail.sent_bytes, *tail.extras)
    width = shape.doubles * parts(into.dtype) + shape.parameters
    head = into[:width] if into.device.type == "cpu" else torch.empty(width, dtype=into.dtype)
    _encode(doubles, head.numpy()[: width - shape.parameters])
    head.numpy()[width - shape.parameters :] = tail.present
    if into.device.type != "cpu":
        into[:width].copy_(head)
    if shape.rows:
        place = into[width:]
        if shape.wide_rows:
            _encode_on_device(tail.rows.flatten(), place)
        else:
            place.copy_(tail.rows.flatten())


def of_one(tail: Tail, shape: TailShape) -> Agreed:
    """What a worker that is alone agrees on: its own entries. Nothing travels, and a GPU is not waited for beyond its
    losses.
    """
    losses = [(0.0, 0.0)] * shape.slices
    for index, total, weight in tail.losses:
        losses[index] = float(total) + 0.0, float(weight) + 0.0  # as a sum with zeros has it: a zero is never negative
    return Agreed(
        losses=tuple(losses),
        flags=(tail.flags,),
        sent_bytes=tail.sent_bytes,
        extras=np.array([tail.extras], dtype=np.float64),
        present=tuple(tail.present),
        rows=tail.rows + 0.0,
    )


def read(shape: TailShape, summed: Tensor) -> Agreed:
    """Everybody's entries from the summed tail. Waits for the device, once."""
    wire = summed.dtype
    width = shape.doubles * parts(wire)
    host = summed[: width + shape.parameters].cpu().numpy()
    doubles = _decode(host[:width])
    losses = doubles[: 2 * shape.slices].tolist()
    by_rank = doubles[2 * shape.slices :].reshape(shape.ranks, 2 + shape.extras)
    heads = by_rank[:, :2].tolist()
    rows = summed[width + shape.parameters :]
    if shape.rows:
        if shape.wide_rows and wire == torch.float32:
            rows = rows.reshape(-1, 3).double().sum(dim=1)
        rows = rows.to(torch.float64 if shape.wide_rows else torch.float32).reshape(shape.rows, -1)
        rows = rows + 0.0  # a zero is never negative, however many add to it
    return Agreed(
        losses=tuple(zip(losses[::2], losses[1::2], strict=True)),
        flags=tuple(int(flags) for flags, _ in heads),
        sent_bytes=int(sum(sent for _, sent in heads)),
        extras=by_rank[:, 2:],
        present=tuple((host[width:] > 0).tolist()),
        rows=rows,
    )


def _encode(values: Doubles, into: np.ndarray[Any, Any]) -> None:
    if into.dtype == np.float64:
        into[:] = values
    else:
        rest = values
        with np.errstate(invalid="ignore", over="ignore"):
            for part in range(3):
                into[part::3] = rest
                rest = rest - into[part::3]
                rest[~np.isfinite(rest)] = 0.0  # an infinity is said by its first part alone


def _encode_on_device(values: Tensor, into: Tensor) -> None:
    if into.dtype == torch.float64:
        into.copy_(values)
    else:
        high = values.float()
        rest = (values - high.double()).nan_to_num(0.0, 0.0, 0.0)
        middle = rest.float()
        low = (rest - middle.double()).float()
        into.copy_(torch.stack((high, middle, low), dim=1).flatten())


def _decode(summed: np.ndarray[Any, Any]) -> Doubles:
    if summed.dtype == np.float64:
        return summed
    with np.errstate(invalid="ignore"):
        total: Doubles = summed.reshape(-1, 3).sum(axis=1, dtype=np.float64)
    return total
