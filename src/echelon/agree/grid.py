"""Exact sums: gradients rounded onto a power-of-two grid and added as integers, where addition has no order.

The integers are held as float64, which adds them exactly as long as they stay below 2**53; on a CPU that is nearly
three times as fast as int64, and a transport sums it as readily.

A bucket's grid has the spacing 2**-k. k follows the largest magnitude that any slice's gradient had in the step
before, so that it is a function of the job alone. It leaves room for `slices` summands and for a sudden growth; a
gradient that is out of range, or so small that the grid is too coarse for it, makes all workers compute the step
again with a k that fits.

    bits of the sum:  53 .. headroom: log2(slices) + growth | 40 .. the largest value .. 0 | below the grid

This module is pure arithmetic; who sends what is in summation.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST_K = 40
TARGET_BITS = 40
COARSEST_BITS = 28
SUM_BITS = 53
K_RANGE = (-100, 120)
MOST_SLICES = 2 ** (SUM_BITS - TARGET_BITS)
BLOCK = 1 << 16


def fitting_k(largest: float) -> int:
    """The k that puts `largest` just below 2**TARGET_BITS."""
    return max(K_RANGE[0], min(K_RANGE[1], TARGET_BITS - math.frexp(largest)[1]))


def next_k(k: int, largest: float) -> int:
    """The k of the next step, from this step's agreed maximum. A bucket of zeros keeps its k."""
    return fitting_k(largest) if largest > 0 else k


def fits(k: int, largest: float, slices: int) -> bool:
    """Whether summands up to `largest` neither overflow the sum of `slices` of them nor vanish below the grid."""
    if largest == 0:
        return True
    bits = math.frexp(largest)[1] + k
    in_range = bits <= SUM_BITS - math.ceil(math.log2(slices))
    fine_enough = bits >= COARSEST_BITS or k == K_RANGE[1]
    return in_range and fine_enough


def has_grid(largest: float, slices: int) -> bool:
    """Whether any grid holds summands up to `largest`: not NaN, infinity, or a double far beyond any single."""
    return math.isfinite(largest) and fits(fitting_k(largest), largest, slices)


def largest_magnitude(values: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(abs(low.item()), abs(high.item())) if not torch.isnan(high) else math.nan


def add_to_grid(values: Tensor, k: int, total: Tensor, first: bool) -> None:
    """Add `values` (overwritten) to the integer `total`, or start it with them; block by block, to stay in cache."""
    step = BLOCK if values.device.type == "cpu" else max(1, values.numel())
    for block, sum_block in zip(values.split(step), total.split(step), strict=True):
        block.mul_(2.0**k).round_()
        if first:
            sum_block.copy_(block)
        else:
            sum_block.add_(block)


def from_grid(total: Tensor, k: int, weight: float, into: Tensor) -> None:
    """The mean: the integer sum scaled back once and divided once by the total weight. A zero is never negative."""
    step = BLOCK if into.device.type == "cpu" else max(1, into.numel())
    for sum_block, block in zip(total.split(step), into.split(step), strict=True):
        block.copy_(sum_block).add_(0.0).mul_(2.0**-k).div_(weight)
