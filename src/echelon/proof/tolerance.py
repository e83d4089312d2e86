"""How far two correct computations of a step may lie apart: derived from the arithmetic, never tuned.

A plan and one process do the same additions in another order. The comparison starts every step from the plan's own
parameters, so nothing is amplified over steps, and applies the plan's own gradient to the reference's optimizer, so
that Adam's division of one rounding error by another is no part of it. What is left is one step's rounding.

Let g_s be slice s's contribution to the mean gradient and M = sum of |g_s|. Any order of adding n numbers errs by at
most gamma(n) M, gamma(n) = n u / (1 - n u) (Higham 2002, section 3.1), so two orders differ by at most twice that.
Slices that are computed alone, on one thread, have the same bits everywhere; then n is slices + 2 (a scaling by 1/N
counts as two). Where slices are merged (or compiled, or on a GPU) the sums inside kernels are cut elsewhere, too: their
n is the number of samples of the step; in bf16 its unit round-off is added, once for the factors and once for the
result. How strongly the network passes rounding on is measured, not bounded: D is the difference between the
reference's slices one by one and the reference's slices merged as the plan merges them. Besides, a gradient that
cancels to nothing (a bias before a softmax) is left with the rounding of terms as large as other tensors' gradients.

    gradient    2 D + 2 gamma M + u max(M)        all by tensor, at its largest element; D = 0 without merging
    loss        2 D + 2 gamma (sum of |slice losses|)
    norm        (4 + sqrt(n)) u |norm|            a sum of n squares (Higham and Mary 2019)
    parameter   4 u |p| + t (16 u + r) |change|   r: the norm's relative tolerance; t: steps, since moments carry it on

Exact mode needs none of this: bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SINGLE = 2.0**-24
DOUBLE = 2.0**-53
BRAIN = 2.0**-8  # bf16: 8 significant bits


def unit(dtype: torch.dtype) -> float:
    """The unit round-off of a floating-point (or complex) type."""
    return torch.finfo(dtype).eps / 2


def gamma(count: int, u: float) -> float:
    """The relative error of adding `count` numbers, in any order."""
    return count * u / (1.0 - count * u) if count * u < 0.5 else 1.0


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What a step's rounding depends on. `loose`: kernels may see other shapes than the reference's (merged, ...)."""

    slices: int
    samples: int
    loose: bool
    bf16: bool

    def inner(self, u: float) -> float:
        """Of one slice's own arithmetic."""
        if not self.loose:
            return 0.0
        return gamma(self.samples, min(u, SINGLE)) + (2 * BRAIN if self.bf16 else 0.0)

    def gradient(self, spread: float, mass: float, largest_mass: float, dtype: torch.dtype) -> float:
        u = unit(dtype)
        outer = gamma(self.slices + 2, u)
        return 2 * spread + 2 * (outer + self.inner(u)) * mass + (u * largest_mass if self.loose else 0.0)

    def loss(self, spread: float, mass: float) -> float:
        return 2 * spread + 2 * (gamma(self.slices + 2, DOUBLE) + self.inner(SINGLE)) * mass


def norm_tolerance(norm: float, elements: int) -> float:
    return (4.0 + math.sqrt(elements)) * SINGLE * norm


def parameter_tolerance(step: int, largest: float, change: float, norm_error: float, dtype: torch.dtype) -> float:
    u = unit(dtype)
    return 4 * u * largest + step * (16 * u + norm_error) * change


def merging_matters(spread: float, mass: float, largest_mass: float, u: float) -> bool:
    """Whether merging slices changes more than half of the digits: then it is another result, not another rounding."""
    return spread > math.sqrt(u) * mass + 64 * u * largest_mass


SHORT = {
    True: "bits: exact mode allows no difference",
    False: (
        "each step is computed again from the plan's own parameters; gradient: 2 D + 2 gamma(n) sum|g_s| + u max, "
        "where D is the reference's own difference between two valid orders, n the number of summands, u the unit "
        "round-off and gamma(n) = n u / (1 - n u); "
        "parameter: 4 u |p| + t (16 u + r) |change|, from the plan's own gradient"
    ),
}
