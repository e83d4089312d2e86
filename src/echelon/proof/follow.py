"""Follows a recorded run step by step: from the plan's own parameters, what would one process have computed?

    plan's parameters before the step --> reference's slices    --> losses, gradient    within one step's rounding
    plan's gradient                   --> reference's optimizer --> parameters          within the update's rounding

If every step passes, and the first starts from the right weights, the plan computed what one process computes, by
induction, and no rounding has been amplified on the way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from echelon.proof.clues import distance
from echelon.proof.findings import Figure, Findings, Tensors
from echelon.proof.records import Record
from echelon.proof.reference import Computed, Reference
from echelon.proof.rules import Lesson, merge
from echelon.proof.sampling import compare_samples
from echelon.proof.sums import accumulate, plain_norm
from echelon.proof.tolerance import Rounding, norm_tolerance, parameter_tolerance


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A step's gradient: the sum of the slices' contributions, the sum of their magnitudes, and the loss likewise."""

    gradient: dict[str, Tensor]
    mass: dict[str, float]
    loss: float
    loss_mass: float
    weight: float


@dataclass(kw_only=True)
class Moment:
    """What a closer look at a step needs: the state before it, and what its slices gave."""

    task: Lesson
    entry: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    computed: list[Computed]
    mean: Mean
    tolerances: dict[str, float]


class Follower:
    """A reference that is put where the plan was before each step."""

    def __init__(self, reference: Reference, record: Record, *, merges: bool) -> None:
        self.reference = reference
        self.record = record
        self._merges = merges and not reference.norms.by_batch and not reference.exact
        self.moment: Moment | None = None

    def step(self, number: int) -> Findings:
        """Compare step `number`; to be called for every step in turn."""
        reference, record = self.reference, self.record
        if number > 1:
            reference.load(record.tensors(number - 1, "model"))
        task, entry = reference.lesson(number), record.entry(number)
        before = {name: tensor.clone() for name, tensor in reference.model().items()}
        computed = reference.compute(task, task.pieces)
        mean = self._mean(computed)
        other = self._other_order(task, entry, computed)
        rounding = self._rounding(task)
        masses = max(mean.mass.values(), default=0.0)
        tolerances = {
            name: rounding.gradient(
                distance(g, other.gradient[name]) if name in other.gradient else 0.0, mean.mass[name], masses, g.dtype
            )
            for name, g in mean.gradient.items()
        }
        optimizer = copy.deepcopy(reference.optimizer.state_dict())
        self.moment = Moment(
            task=task,
            entry=entry,
            model=before,
            optimizer=optimizer,
            computed=computed,
            mean=mean,
            tolerances=tolerances,
        )
        loss_tolerance = rounding.loss(abs(mean.loss - other.loss), mean.loss_mass)
        findings = self._compare_gradients(task, entry, mean, tolerances, loss_tolerance)
        return self._compare_update(findings, entry, before, computed)

    def _rounding(self, task: Lesson) -> Rounding:
        job = self.reference.job
        loose = self._merges or job.compile or self.reference.device.type != "cpu"
        return Rounding(slices=job.slices, samples=task.samples, loose=loose, bf16=job.precision == "bf16")

    def contributions(self, computed: Sequence[Computed]) -> list[dict[str, Tensor]]:
        """What each slice contributes to the mean gradient."""
        weight = math.fsum(c.weight for c in computed)
        is_scaled = bool(computed) and computed[0].is_mean and not self.reference.exact
        if is_scaled or not weight:
            return [c.gradients for c in computed]
        return [{name: g / weight for name, g in c.gradients.items()} for c in computed]

    def _mean(self, computed: Sequence[Computed]) -> Mean:
        weight = math.fsum(c.weight for c in computed)
        total: dict[str, Tensor] = {}
        mass: dict[str, Tensor] = {}
        for gradients in self.contributions(computed):
            accumulate(total, gradients)
            accumulate(mass, {name: g.abs() for name, g in gradients.items()})
        loss = 0.0
        for c in computed:
            loss += c.total
        return Mean(
            gradient=total,
            mass={name: float(m.max()) if m.numel() else 0.0 for name, m in mass.items()},
            loss=loss / weight if weight else 0.0,
            loss_mass=math.fsum(abs(c.total) for c in computed) / weight if weight else 0.0,
            weight=weight,
        )

    def _other_order(self, task: Lesson, entry: dict[str, Any], computed: Sequence[Computed]) -> Mean:
        """The same arithmetic in another order: the slices merged as the plan merges them, or added backwards."""
        if not self._merges:
            return self._mean(list(reversed(computed)))
        buffers = {name: b.clone() for name, b in self.reference.module.named_buffers()}
        groups = [
            group
            for start, stop in entry["shares"]
            for group in merge(task.pieces[start:stop], self.reference.job.microbatch)
        ]
        try:
            return self._mean(self.reference.compute(task, groups))
        finally:
            for name, buffer in self.reference.module.named_buffers():
                buffer.copy_(buffers[name])

    def _compare_gradients(
        self, task: Lesson, entry: dict[str, Any], mean: Mean, tolerances: dict[str, float], loss_tolerance: float
    ) -> Findings:
        plan = {name: g.to(self.reference.device) for name, g in self.record.tensors(task.number, "gradient").items()}
        should = mean.gradient if mean.weight else {}
        gaps = {name: (distance(plan[name], g) if name in plan else math.inf) for name, g in should.items()}
        gaps |= dict.fromkeys(plan.keys() - should.keys(), math.inf)
        elements = sum(g.numel() for g in should.values())
        norm = plain_norm(should)
        spread = math.sqrt(sum(tolerances[name] ** 2 * g.numel() for name, g in should.items()))
        missing, extra = compare_samples(self.record, task, entry)
        none = Tensors()
        return Findings(
            step=task.number,
            last_of_epoch=task.is_last,
            workers=self.record.ranks,
            loss=Figure(plan=entry["loss"], reference=mean.loss, tolerance=loss_tolerance),
            weight=Figure(plan=entry["weight"], reference=mean.weight, tolerance=1e-6 * mean.weight),
            norm=Figure(plan=plain_norm(plan), reference=norm, tolerance=spread + norm_tolerance(norm, elements)),
            gradients=compare(gaps, tolerances, list(self.reference.parameters)),
            parameters=none,
            buffers=none,
            missing=missing,
            extra=extra,
            clip=self.reference.job.clip,
        )

    def _compare_update(
        self, found: Findings, entry: dict[str, Any], before: dict[str, Tensor], computed: list[Computed]
    ) -> Findings:
        """Apply the plan's gradient with the reference's optimizer, as the plan should have."""
        reference, number = self.reference, found.step
        plan = {name: g.to(reference.device) for name, g in self.record.tensors(number, "gradient").items()}
        elements = sum(g.numel() for g in plan.values())
        error = norm_tolerance(1.0, elements) if reference.job.clip is not None and not reference.exact else 0.0
        clip_norm = None
        if plan:
            norm = reference.update(plan)
            reference.norms.apply(c.row for c in computed)
            if norm is not None:
                used = entry["norm"] if entry["norm"] is not None else math.nan
                clip_norm = Figure(plan=used, reference=norm, tolerance=2 * norm_tolerance(norm, elements))
        else:
            reference.advance()
        after, theirs = reference.model(), self.record.tensors(number, "model")
        ignored = frozenset().union(*(c.changed for c in computed))
        gaps, limits = {}, {}
        for name, tensor in after.items():
            if name in ignored or not (tensor.is_floating_point() or tensor.is_complex()):
                gaps[name] = 0.0 if name in ignored else distance(theirs[name], tensor)
                limits[name] = 0.0
                continue
            gaps[name] = distance(theirs[name], tensor)
            limits[name] = parameter_tolerance(
                number, largest(tensor), distance(tensor, before[name]), error, tensor.dtype
            )
        parameters = [name for name, _ in reference.module.named_parameters()]
        buffers = [name for name in after if name not in parameters]
        rates = tuple(
            Figure(plan=a, reference=b, tolerance=1e-12 * abs(b))
            for a, b in zip(entry["rates"], reference.rates(), strict=False)
        )
        return replace(
            found,
            clip_norm=clip_norm,
            parameters=compare({n: gaps[n] for n in parameters}, limits, parameters),
            buffers=compare({n: gaps[n] for n in buffers}, limits, buffers),
            rates=rates,
            ranks=self._ranks(number, {name: limits[name] for name in limits if name not in ignored}, after),
        )

    def _ranks(self, number: int, limits: dict[str, float], model: dict[str, Tensor]) -> tuple[str, ...]:
        """Names on which the ranks differ by more than their tolerance allows (by the sum of magnitudes)."""
        entries = [self.record.entry(number, rank) for rank in range(self.record.ranks)]
        differing = []
        for name, limit in limits.items():
            path = f"model/{name}"
            if len({entry["hashes"][path] for entry in entries}) > 1:
                sums = [entry["sums"][path] for entry in entries]
                if not max(sums) - min(sums) <= model[name].numel() * limit:
                    differing.append(name)
        return tuple(differing)


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def compare(gaps: dict[str, float], limits: dict[str, float], order: Sequence[str]) -> Tensors:
    """The tensor that comes closest to its tolerance, or exceeds it most, and all that exceed theirs."""
    names = [name for name in order if name in gaps] + [name for name in gaps if name not in order]
    different = tuple(name for name in names if not gaps[name] <= limits.get(name, 0.0))
    worst = max(names, key=lambda name: _ratio(gaps[name], limits.get(name, 0.0)), default=None)
    return Tensors(
        difference=gaps[worst] if worst else 0.0,
        tolerance=limits.get(worst, 0.0) if worst else 0.0,
        different=different,
        count=len(names),
    )


def _ratio(gap: float, limit: float) -> float:
    if not math.isfinite(gap):
        return math.inf
    return gap / limit if limit else (math.inf if gap else 0.0)
