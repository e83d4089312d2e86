"""Which known mistake explains a wrong gradient: each is made with the reference's slices and held against the plan.

A mistake explains the difference if what it would have given lies within the tolerance of what the plan had, or takes
away 99 % of the difference. It must do so for every tensor that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.proof.sums import accumulate, plain_norm

Gradients = Mapping[str, Tensor]
NEAR = 0.01


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One step as the reference computed it.

    `parts`: slice number to its contribution to the mean gradient; `weights`: by the same number; `mean`: their sum.
    `shares`: the slices of every rank. `previous`: the plan's gradient of the step before.
    """

    parts: Mapping[int, Gradients]
    weights: Mapping[int, float]
    mean: Gradients
    shares: Sequence[range]
    previous: Gradients
    clip: float | None
    tolerance: Callable[[str], float]

    def of_rank(self, rank: int) -> tuple[dict[str, Tensor], float]:
        """What a rank's slices contribute, and their weight."""
        total: dict[str, Tensor] = {}
        mine = [index for index in self.parts if index in self.shares[rank]]
        for index in mine:
            accumulate(total, self.parts[index])
        return total, sum(self.weights[index] for index in mine)

    @property
    def weight(self) -> float:
        return sum(self.weights.values())


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A word that reason.py knows, and a number that goes with it."""

    word: str = ""
    number: float = 0.0


def find_cause(plan: Gradients, different: Sequence[str], evidence: Evidence) -> Cause:
    """The first known mistake that explains every gradient that differs."""
    missing = [name for name in different if name not in plan]
    if len(missing) == len(different):
        return Cause(word="absent")
    if all(name not in evidence.mean for name in different):
        return Cause(word="surplus")
    there = [name for name in different if name in plan and name in evidence.mean]
    for cause, guess in _guesses(evidence):
        if all(_explains(plan[name], guess, name, evidence) for name in there):
            return cause
    factor = _factor(plan, there, evidence)
    return Cause(word="factor", number=factor) if factor is not None else Cause()


def _guesses(evidence: Evidence) -> Iterator[tuple[Cause, Gradients]]:
    if evidence.previous:
        yield Cause(word="stale"), evidence.previous
    ranks = [evidence.of_rank(rank) for rank in range(len(evidence.shares))]
    total = evidence.weight
    if len(ranks) > 1:
        yield Cause(word="worker mean"), _combined(ranks, lambda weight: total / weight / len(ranks))
        own, weight = ranks[0]
        yield Cause(word="own"), own
        if weight:
            yield Cause(word="own mean"), _scaled(own, total / weight)
        if evidence.clip is not None:
            yield Cause(word="clipped by worker"), _clipped_sum(ranks, evidence.clip, lambda _: 1.0)
            yield Cause(word="clipped by worker"), _clipped_sum(ranks, evidence.clip, lambda w: total / w)
    slices = [(part, evidence.weights[index]) for index, part in evidence.parts.items()]
    yield Cause(word="weights ignored"), _combined(slices, lambda weight: total / weight / len(slices))
    for index, part in evidence.parts.items():
        weight = evidence.weights[index]
        without = {name: g - part[name] if name in part else g for name, g in evidence.mean.items()}
        yield Cause(word="slice missing", number=index), without
        if weight < total:
            yield Cause(word="slice missing", number=index), _scaled(without, total / (total - weight))
        double = {name: g + part[name] if name in part else g for name, g in evidence.mean.items()}
        yield Cause(word="slice twice", number=index), double


def _combined(parts: Sequence[tuple[Gradients, float]], factor: Callable[[float], float]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for gradients, weight in parts:
        if weight:
            accumulate(total, _scaled(gradients, factor(weight)))
    return total


def _clipped_sum(
    ranks: Sequence[tuple[Gradients, float]], clip: float, factor: Callable[[float], float]
) -> dict[str, Tensor]:
    """Every worker clips its own: its sum (factor 1), or its mean, which is then weighted like everybody's."""
    total: dict[str, Tensor] = {}
    for gradients, weight in ranks:
        if weight:
            norm = plain_norm(gradients) * factor(weight)
            accumulate(total, _scaled(gradients, min(1.0, clip / (norm + 1e-6))))
    return total


def _scaled(gradients: Gradients, factor: float) -> dict[str, Tensor]:
    return {name: gradient * factor for name, gradient in gradients.items()}


def _explains(plan: Tensor, guess: Gradients, name: str, evidence: Evidence) -> bool:
    if name not in guess or guess[name].shape != plan.shape:
        return False
    left = distance(plan, guess[name])
    return left <= max(4 * evidence.tolerance(name), NEAR * distance(plan, evidence.mean[name]))


def _factor(plan: Gradients, names: Sequence[str], evidence: Evidence) -> float | None:
    """The constant that the plan's gradients are times the right ones, if there is one for all."""
    dot = sum(float((plan[n].double() * evidence.mean[n].double()).sum()) for n in names if not plan[n].is_complex())
    square = sum(float(evidence.mean[n].double().square().sum()) for n in names if not plan[n].is_complex())
    if not square:
        return None
    factor = dot / square
    explained = all(_explains(plan[name], _scaled(evidence.mean, factor), name, evidence) for name in names)
    return factor if explained else None


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one is not a number and the other is."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    gap = (a.to("cpu", _wide(a)) - b.to("cpu", _wide(b))).abs()
    gap[a.cpu() == b.cpu()] = 0.0  # infinities of the same sign
    return float("inf") if bool(torch.isnan(gap).any()) else float(gap.max())


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
