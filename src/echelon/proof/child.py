"""What runs in processes of their own for verify: the reference first, the comparison last, the plan in between.

Each is a single worker, started like any other, on one thread: no thread of torch is ever made in the caller's process,
which may have to fork again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.assemble import prepare
from echelon.errors import ConfigError, Stopped
from echelon.fleet import WorkerStart
from echelon.job import Job
from echelon.place import Place
from echelon.plan import Plan
from echelon.proof.clues import distance
from echelon.proof.compare import compare
from echelon.proof.records import write_reference
from echelon.proof.reference import Computed, Reference
from echelon.proof.rules import merge, steps_per_epoch, steps_to_prove
from echelon.proof.sums import accumulate
from echelon.proof.tolerance import BRAIN, merging_matters, unit
from echelon.request import Source
from echelon.result import Result
from echelon.worker import TetherLine, be_inside

Entry = Callable[[WorkerStart], int]


def run_reference(start: WorkerStart) -> int:
    """The reference of a job in a file."""
    return _reference(start, _load(start))


def run_comparison(start: WorkerStart) -> int:
    """The comparison for a job in a file."""
    return _comparison(start, _load(start))


def reference_of(job: Job) -> Entry:
    return lambda start: _reference(start, job)


def comparison_of(job: Job) -> Entry:
    return lambda start: _comparison(start, job)


def _load(start: WorkerStart) -> Job:
    be_inside()
    job = Source(**start.request["source"]).load(rank=-1)
    if not isinstance(job, Job):
        raise ConfigError("job", f"is {type(job).__name__} and must be an echelon.Job")
    return job


def alone() -> Place:
    """Where a single process with one thread is."""
    return Place(rank=0, workers=1, local_rank=0, local_workers=1, cores=1)


def stop_if_asked(start: WorkerStart) -> None:
    if start.tether.stop_requested:
        raise Stopped(step=0, run="")


def _quiet(start: WorkerStart, exact: bool) -> torch.device:
    be_inside()
    torch.set_num_threads(1)
    device = alone().device()
    torch.use_deterministic_algorithms(exact and device.type == "cuda")
    TetherLine(start.tether).meet()
    return device


def with_fields(job: Job, **changes: Any) -> Job:
    """The same job but for these fields."""
    return Job(**{**{field.name: getattr(job, field.name) for field in fields(job)}, **changes})


def _reference(start: WorkerStart, job: Job) -> int:
    request = start.request
    exact = request["exact"]
    device = _quiet(start, exact)
    # Whatever is wrong with the job or the plan is said here as training would say it.
    prepare(job, Plan.parse(request["plan"]), workers=request["workers"], device=device, exact=exact)
    reference = Reference(job, exact=exact, device=device)
    per_epoch = steps_per_epoch(reference.size, job.batch)
    steps = request["steps"] or steps_to_prove(per_epoch, reference.total_steps)
    notes = [] if request["steps"] else [_say_steps(steps, per_epoch, reference.total_steps)]
    why_apart = _why_apart(reference)
    draws = reference.merging_draws
    changed: set[str] = set()
    for number in range(1, steps + 1):
        stop_if_asked(start)
        done = reference.step(number)
        draws = draws or done.drew
        changed |= done.changed
        write_reference(Path(request["folder"]) / "reference", reference, done)
        message = f"reference, one process: step {number}/{steps}, loss {done.loss:.4f}"
        start.tether.send({"kind": "event", "event": {"event": "reference", "message": message}})
    if draws and not why_apart:
        why_apart = "the model draws random numbers, so merging would change results in distribution"
    if not exact and why_apart and not reference.norms.by_batch:
        notes.append(f"slices were not merged under the plan: {why_apart}")
    if changed:
        notes.append(
            f"not compared, since forward changes them and rank 0's values count: {', '.join(sorted(changed))}"
        )
    free = {
        "draws": draws,
        "changed": sorted(changed),
        "merge": not why_apart,
        "notes": notes,
        "device": str(device),
    }
    start.tether.send({"kind": "done", "result": None, "steps": steps, "free": free})
    return 0


def _say_steps(steps: int, per_epoch: int, total: int) -> str:
    if steps == per_epoch + 1:
        return f"{steps} steps: one epoch and one step more (say another number with --steps)"
    if steps == total:
        return f"{steps} steps: all that the job has"
    return f"{steps} steps; an epoch ends after {per_epoch} (say another number with --steps)"


def _why_apart(reference: Reference) -> str:
    """Why slices must not be merged for this proof: because merging gives another result, in the very first step."""
    if reference.exact or reference.norms.by_batch:
        return ""
    task = reference.lesson(1)
    buffers = {name: b.clone() for name, b in reference.module.named_buffers()}
    apart = reference.compute(task, task.pieces)
    together = reference.compute(task, merge(task.pieces, reference.job.microbatch))
    for name, buffer in reference.module.named_buffers():
        buffer.copy_(buffers[name])
    if any(c.drew for c in apart):
        return "the model draws random numbers, so merging would change results in distribution"
    name = _first_that_merging_changes(reference, apart, together)
    if not name:
        return ""
    return (
        f"merging changes the gradient of {name} by more than rounding, so the loss is no mean or sum over samples; "
        "training without --exact depends on the number of workers"
    )


def _first_that_merging_changes(reference: Reference, apart: list[Computed], together: list[Computed]) -> str:
    one, other = (_total(computed) for computed in (apart, together))
    masses: dict[str, Tensor] = {}
    for c in apart:
        accumulate(masses, {name: g.abs() for name, g in c.gradients.items()})
    mass = {name: float(m.max()) if m.numel() else 0.0 for name, m in masses.items()}
    largest = max(mass.values(), default=0.0)
    for name, gradient in one.items():
        u = BRAIN if reference.job.precision == "bf16" else unit(gradient.dtype)
        if name not in other or merging_matters(distance(gradient, other[name]), mass[name], largest, u):
            return name
    return ""


def _total(computed: list[Computed]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for c in computed:
        accumulate(total, c.gradients)
    return total


def _comparison(start: WorkerStart, job: Job) -> int:
    request = start.request
    _quiet(start, request["exact"])
    folder = Path(request["folder"])
    report = compare(
        job,
        folder,
        result=Result(**request["result"]),
        exact=request["exact"],
        steps=request["steps"],
        free=request["free"],
    )
    (folder / "report.json").write_text(json.dumps(report.to_dict()))
    start.tether.send({"kind": "done", "result": None})
    return 0
