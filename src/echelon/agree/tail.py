"""The step's tail: what workers must agree on, carried at the end of the last bucket, not in a message of its own.

Every number has a place that exactly one worker fills; the others leave zero there, and a sum with zeros is exact. A
double travels as three float32 parts (24 bits each), or as one float64.

    | loss, weight of slice 0 .. S-1 | flags, bytes, extras of rank 0 .. R-1 | presence of parameters | rows |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

Doubles = np.ndarray[Any, np.dtype[np.float64]]


class Flag(IntEnum):
    """What a worker says of its step."""

    STOP = 1
    MEANS = 2
    SUMS = 4
    BUFFERS = 8


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
    extras: Doubles
    present: tuple[bool, ...]
    rows: Tensor


def write(tail: Tail, shape: TailShape, rank: int, into: Tensor) -> None:
    """Fill this worker's places of the flat tail `into`, zero elsewhere."""
    doubles = np.zeros(shape.doubles)
    for index, total, weight in tail.losses:
        doubles[2 * index] = _number(total)
        doubles[2 * index + 1] = _number(weight)
    start = 2 * shape.slices + rank * (2 + shape.extras)
    doubles[start : start + 2 + shape.extras] = (tail.flags, tail.sent_bytes, *tail.extras)
    width = shape.doubles * parts(into.dtype)
    if into.device.type == "cpu":
        _encode_on_host(doubles, into[:width].numpy())
        into[width : width + shape.parameters].numpy()[:] = tail.present
    else:
        _encode_on_device(_with_device_losses(torch.from_numpy(doubles).to(into.device), tail), into[:width])
        present = torch.tensor(tail.present, dtype=torch.float32)
        into[width : width + shape.parameters].copy_(present.to(into.device))
    if shape.rows:
        place = into[width + shape.parameters :]
        if shape.wide_rows:
            _encode_on_device(tail.rows.flatten(), place)
        else:
            place.copy_(tail.rows.flatten())


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


def _number(value: Tensor | float) -> float:
    if isinstance(value, Tensor):
        return 0.0 if value.device.type != "cpu" else value.item()
    return value


def _with_device_losses(values: Tensor, tail: Tail) -> Tensor:
    """Put losses that live on a GPU in their places without waiting for them."""
    for index, *pair in tail.losses:
        for offset, number in enumerate(pair):
            if isinstance(number, Tensor) and number.device.type != "cpu":
                values[2 * index + offset].copy_(number.reshape(()))
    return values


def _encode_on_host(values: Doubles, into: np.ndarray[Any, Any]) -> None:
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
