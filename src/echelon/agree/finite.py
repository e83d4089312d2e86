"""Losses, weights and gradients that are no numbers: told before anything is applied, by all workers alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.agree.summation import Summation
from echelon.agree.tail import Agreed
from echelon.errors import Diverged, UserError
from echelon.slices import Step


def check_finite(step: Step, agreed: Agreed, shares: Sequence[range], gradients: Summation, rank: int) -> None:
    """Raise what is wrong with a step; `rank` is who asks, `shares` are the slices of each rank."""
    _check_losses(step, agreed, shares, rank)
    for owner, extras in enumerate(agreed.extras):
        for index, top in enumerate(extras):
            if not gradients.takes(float(top)):
                names, share = gradients.buckets[index].plan.names, shares[owner]
                raise Diverged(
                    step.number,
                    f"a gradient is {top}, among {names[-1]} ... {names[0]}; nothing was applied. "
                    f"See: echelon replay RUN --step {step.number} --slice {share.start} (rank {owner} had slices "
                    f"{share.start} to {share.stop - 1})",
                    owner,
                )


def _check_losses(step: Step, agreed: Agreed, shares: Sequence[range], rank: int) -> None:
    for index, (total, weight) in enumerate(agreed.losses):
        if not (math.isfinite(total) and math.isfinite(weight)):
            owner = next((rank for rank, share in enumerate(shares) if index in share), 0)
            which = _slices_of(index, agreed.losses, shares[owner])
            what = (
                f"the loss of {which} is {total}" if not math.isfinite(total) else f"the weight of {which} is {weight}"
            )
            raise Diverged(
                step.number,
                f"{what}; nothing was applied. See: echelon replay RUN --step {step.number} --slice {index}",
                owner,
            )
        if weight < 0:
            raise UserError(
                rank, f"loss returned the weight {weight} in step {step.number}, slice {index}; weights are at least 0"
            )


def _slices_of(index: int, losses: Sequence[tuple[float, float]], share: range) -> str:
    """A worker's merged slices have one loss, in the place of the first of them."""
    last = index
    while last + 1 in share and losses[last + 1] == (0.0, 0.0):
        last += 1
    return f"slice {index}" if last == index else f"slices {index} to {last} (merged)"
