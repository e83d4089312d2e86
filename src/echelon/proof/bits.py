"""Exact mode's comparison: two records, bit for bit, hashes first and values only where those differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from echelon.proof.clues import distance
from echelon.proof.findings import Figure, Findings, Tensors
from echelon.proof.records import Record
from echelon.proof.rules import Lesson
from echelon.proof.sampling import compare_samples
from echelon.proof.sums import plain_norm


def compare_bits(
    plan: Record, reference: Record, task: Lesson, *, parameters: list[str], clip: float | None
) -> Findings:
    """One step of the plan against the same step of the reference; and the ranks against each other."""
    number = task.number
    theirs, mine = plan.entry(number), reference.entry(number)
    missing, extra = compare_samples(plan, task, theirs)
    gradients = _compare(plan, reference, number, "gradient", None)
    has_model = {path.removeprefix("model/") for path in mine["hashes"] if path.startswith("model/")}
    losses_agree = [list(pair) for pair in theirs["losses"]] == [list(pair) for pair in mine["losses"]]
    loss = Figure(plan=theirs["loss"], reference=mine["loss"], tolerance=0.0 if losses_agree else -1.0)
    right = plain_norm(reference.tensors(number, "gradient"))
    norm = right if not gradients.different else plain_norm(plan.tensors(number, "gradient"))
    clip_norm = None
    if mine["norm"] is not None:
        clip_norm = Figure(plan=theirs["norm"] if theirs["norm"] is not None else float("nan"), reference=mine["norm"])
    return Findings(
        step=number,
        last_of_epoch=task.is_last,
        workers=plan.ranks,
        loss=loss,
        weight=Figure(plan=theirs["weight"], reference=mine["weight"]),
        norm=Figure(plan=norm, reference=right),
        gradients=gradients,
        parameters=_compare(plan, reference, number, "model", parameters),
        buffers=_compare(plan, reference, number, "model", sorted(has_model - set(parameters))),
        missing=missing,
        extra=extra,
        clip=clip,
        clip_norm=clip_norm,
        rates=tuple(Figure(plan=a, reference=b) for a, b in zip(theirs["rates"], mine["rates"], strict=False)),
        optimizer=tuple(_differing(theirs["hashes"], mine["hashes"], "optimizer/")),
        ranks=tuple(_ranks(plan, number)),
    )


def _compare(plan: Record, reference: Record, number: int, kind: str, names: Iterable[str] | None) -> Tensors:
    theirs, mine = plan.entry(number)["hashes"], reference.entry(number)["hashes"]
    everything = [path.removeprefix(f"{kind}/") for path in {**mine, **theirs} if path.startswith(f"{kind}/")]
    kept = everything if names is None else list(names)
    different = tuple(name for name in kept if theirs.get(f"{kind}/{name}") != mine.get(f"{kind}/{name}"))
    gap = max_gap(plan.tensors(number, kind), reference.tensors(number, kind), different) if different else 0.0
    return Tensors(difference=gap, tolerance=0.0, different=different, count=len(kept))


def max_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """The largest difference of these tensors; infinite where one of them is missing."""
    return max((distance(a[n], b[n]) if n in a and n in b else float("inf") for n in names), default=0.0)


def _differing(theirs: dict[str, Any], mine: dict[str, Any], prefix: str) -> list[str]:
    """Names in both whose hashes differ."""
    both = [path for path in mine if path.startswith(prefix) and path in theirs]
    return [path.removeprefix(prefix) for path in both if theirs[path] != mine[path]]


def _ranks(plan: Record, number: int) -> list[str]:
    """What the ranks do not agree on, by name; state that a rank does not have is not compared."""
    first = plan.entry(number)["hashes"]
    found: dict[str, None] = {}
    for rank in range(1, plan.ranks):
        found |= dict.fromkeys(_differing(plan.entry(number, rank)["hashes"], first, "model/"))
    return list(found)
