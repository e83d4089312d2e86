"""From two records to a report: every step compared, the first one that differs looked at more closely."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.job import Job
from echelon.proof.bits import compare_bits, max_gap
from echelon.proof.closer import look_closer
from echelon.proof.findings import Findings, Tensors
from echelon.proof.follow import Follower
from echelon.proof.reason import likely_reason
from echelon.proof.records import Record
from echelon.proof.reference import Reference
from echelon.proof.report import Report, Row
from echelon.proof.tolerance import SHORT
from echelon.result import Result


def compare(job: Job, folder: Path, *, result: Result, exact: bool, steps: int, free: dict[str, Any]) -> Report:
    """`result` is that of the run under the plan, `free` what the reference said of its own free run (see child.py)."""
    device = torch.device(free["device"])
    reference = Reference(job, exact=exact, device=device)
    run, beside = Record(folder / "plan"), Record(folder / "reference")
    follower = Follower(reference, run, merges=free["merge"])
    findings: list[Findings] = []
    first: Findings | None = None
    parameters = [name for name, _ in reference.module.named_parameters()]
    for number in range(1, steps + 1):
        if exact:
            found = compare_bits(run, beside, reference.lesson(number), parameters=parameters, clip=job.clip)
        else:
            found = follower.step(number)
        if found.kind and first is None:
            first = found = _look(follower, found, exact=exact, draws=free["draws"])
        findings.append(found)
    drift = 0.0
    for number in range(1, steps + 1):
        mine = beside.tensors(number, "model")
        drift = max(drift, max_gap(run.tensors(number, "model"), mine, mine.keys() - set(free["changed"])))
    return Report(
        equal=first is None,
        max_abs_diff=drift,
        first_difference=_place(first) if first else None,
        likely_reason=likely_reason(first) if first else "",
        tolerances=_tolerances(findings, exact=exact),
        rows=tuple(_row(found) for found in findings),
        notes=tuple(free["notes"]),
        exact=exact,
        result=result,
    )


def _look(follower: Follower, found: Findings, *, exact: bool, draws: bool) -> Findings:
    if not exact:
        return look_closer(follower, found, draws=draws)
    followed = follower.step(1)
    for number in range(2, found.step + 1):
        followed = follower.step(number)
    clues = look_closer(follower, _in_place(found, followed), draws=draws).clues
    if found.gradients.different and not followed.gradients.different:
        clues = replace(clues, gradient_cause="rounding")
    return replace(found, clues=replace(clues, rounding_only=followed.loss.ok and not clues.ranks_off))


def _in_place(found: Findings, followed: Findings) -> Findings:
    """What differs in bits, but the update judged from the plan's own gradient: a wrong gradient is no wrong update."""
    return replace(found, loss=followed.loss, parameters=followed.parameters, buffers=followed.buffers)


def _place(found: Findings) -> dict[str, Any]:
    place: dict[str, Any] = {"step": found.step, "kind": found.kind, "name": found.name}
    tensors: Tensors = next((t for t in (found.gradients, found.parameters, found.buffers) if t.different), Tensors())
    if tensors.different:
        place |= {"difference": tensors.difference, "tolerance": tensors.tolerance}
    return place


def _tolerances(findings: list[Findings], *, exact: bool) -> dict[str, Any]:
    largest = {
        "loss": max((max(f.loss.tolerance, 0.0) for f in findings), default=0.0),
        "gradient": max((f.gradients.tolerance for f in findings), default=0.0),
        "parameter": max((f.parameters.tolerance for f in findings), default=0.0),
    }
    return {"rule": SHORT[exact], **largest}


def _row(found: Findings) -> Row:
    tensors = found.parameters if found.parameters.different or not found.buffers.different else found.buffers
    return Row(
        step=found.step,
        loss=found.loss.plan,
        reference_loss=found.loss.reference,
        loss_tolerance=max(found.loss.tolerance, 0.0),
        norm=found.norm.plan,
        reference_norm=found.norm.reference,
        norm_tolerance=found.norm.tolerance,
        gradient_difference=found.gradients.difference,
        gradient_tolerance=found.gradients.tolerance,
        parameter_difference=tensors.difference,
        parameter_tolerance=tensors.tolerance,
        ok=not found.kind,
    )
