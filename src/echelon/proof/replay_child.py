"""The process that computes a slice again: it brings a reference to the step, then looks into the slice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint import read
from echelon.errors import CheckpointCorrupt, ConfigError, users_code
from echelon.fleet import WorkerStart
from echelon.job import Job
from echelon.proof.child import alone, stop_if_asked, with_fields
from echelon.proof.looking import NotFinite, Watcher, find_in, summarize, tensors_of
from echelon.proof.reference import Reference
from echelon.proof.replay_report import ReplayReport
from echelon.proof.rules import Lesson
from echelon.request import Source
from echelon.state import State
from echelon.worker import TetherLine, be_inside


def run_replay(start: WorkerStart) -> int:
    request = start.request
    be_inside()
    torch.set_num_threads(1)
    line = TetherLine(start.tether)
    job = Source(**request["facts"]["source"]).load(rank=-1)
    if not isinstance(job, Job):
        why = "it was a training loop of one's own, and only a Job says how a slice is computed"
        raise ConfigError("run", f"{request['run']}: {why}")
    line.meet()

    def tell(message: str) -> None:
        stop_if_asked(start)
        line.show({"event": "replay", "message": message})

    report = replay_job(job, request["run"], request["facts"], request["step"], request["slice"], tell)
    Path(request["answer"]).write_text(json.dumps(report.to_dict()))
    start.tether.send({"kind": "done", "result": None})
    return 0


def replay_job(
    job: Job, run: str, facts: dict[str, Any], step: int, index: int, tell: Callable[[str], None]
) -> ReplayReport:
    """Bring a reference to the state before `step`, then compute slice `index` under watch."""
    exact = facts["exact"]
    job = with_fields(job, steps=facts["steps"], epochs=None, compile=False)
    reference = Reference(job, exact=exact, device=alone().device())
    _check_same(job, reference, facts)
    notes: list[str] = []
    saved = _newest(Path(run) / "checkpoints", step - 1, notes.append)
    if saved is not None:
        restore(reference, saved)
    begin = saved.step if saved is not None else 0
    for number in range(begin + 1, step):
        done = reference.step(number)
        tell(f"step {number} of {step - 1} computed again, loss {done.loss:.4f}")
    if begin < step - 1 and not exact:
        notes.append(f"steps {begin + 1} to {step - 1} were computed again in one process: equal within rounding")
    task = reference.lesson(step)
    piece = task.pieces[index]
    if not piece.ids:
        raise ConfigError("slice", f"slice {index} of step {step} has no samples (an epoch's short last step)")
    seen = _look_into(reference, task.number, index)
    if seen["first_not_finite"] is None:
        notes += _bad_neighbours(reference, task, index)
    return ReplayReport(
        run=run,
        step=step,
        slice=index,
        epoch=task.epoch,
        from_step=begin,
        samples=piece.ids,
        notes=tuple(notes),
        **seen,
    )


def _look_into(reference: Reference, step: int, index: int) -> dict[str, Any]:
    task = reference.lesson(step)
    ids = task.pieces[index].ids
    weights = find_in(iter(reference.model().items()), "the model's own tensor", ())
    batch = reference.read(task, task.pieces[index])
    inputs = summarize(batch)
    in_batch = find_in(tensors_of(batch), "the input", ids)
    watcher = Watcher(ids=ids)
    with watcher.watch(reference.module):
        with users_code("computing the loss"):
            value, weight = reference.forward(batch)
        after = find_in(iter([("the loss", value)]), "the loss function itself, after the last module:", ())
        count = float(len(ids)) if weight is None else float(weight)
        scale = 1.0 if weight is None else 1.0 / count if count else 0.0
        with users_code("running backward"):
            value.backward(torch.full_like(value, scale))
    gradients = {name: p.grad for name, p in reference.parameters.items() if p.grad is not None}
    in_gradients = find_in(iter(gradients.items()), "the gradient of", ())
    first = weights or in_batch or watcher.forward or after or watcher.backward or in_gradients
    norms = sorted(((name, _norm(g)) for name, g in gradients.items()), key=_largest_first)
    return {
        "loss": float(value.detach()) * scale,
        "weight": count,
        "inputs": tuple(asdict(record) for record in inputs),
        "gradient_norm": math.sqrt(math.fsum(norm**2 for _, norm in norms)) if norms else 0.0,
        "gradients": tuple(norms),
        "first_not_finite": _to_dict(first),
    }


def _bad_neighbours(reference: Reference, task: Lesson, index: int) -> list[str]:
    """A run that merged slices can only say which worker's loss was no number: look at the step's other slices, too."""
    notes = []
    norms = reference.norms.read()
    for piece in task.pieces:
        if piece.ids and piece.index != index:
            batch = reference.read(task, piece)
            reference.norms.write(norms)
            with torch.no_grad(), users_code("computing the loss"):
                value, _ = reference.forward(batch)
            if not bool(torch.isfinite(value).all()):
                notes.append(f"the loss of slice {piece.index} of this step is {float(value)}: replay that one")
    return notes


def _to_dict(found: NotFinite | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "samples": list(found.samples)}


def _norm(gradient: Tensor) -> float:
    return float(gradient.abs().double().square().sum().sqrt())


def _largest_first(entry: tuple[str, float]) -> tuple[bool, float]:
    return not math.isnan(entry[1]), -entry[1]


def _check_same(job: Job, reference: Reference, facts: dict[str, Any]) -> None:
    """The file may have changed since; what the slice hangs on must be as it was."""
    now = {"seed": job.seed, "batch": job.batch, "slices": job.slices, "samples_in_dataset": reference.size}
    for name, value in now.items():
        if facts[name] != value:
            why = f"the job has {name}={value} now and the run had {facts[name]}; set the file back to what it was"
            raise ConfigError(name, why)


def _newest(folder: Path, most: int, report: Callable[[str], None]) -> State | None:
    """The newest sound checkpoint of at most `most` steps."""
    steps = sorted((int(p.name.removeprefix("step-")) for p in folder.glob("step-*") if p.is_dir()), reverse=True)
    for step in steps:
        if step <= most:
            try:
                return read(folder / f"step-{step:08d}")
            except CheckpointCorrupt as error:
                report(f"{error}; an earlier one was used")
    return None


def restore(reference: Reference, state: State) -> None:
    """Put a checkpoint into the reference: weights, buffers, optimizer, schedule, the exact sum's grids."""
    model = {path.removeprefix("model/"): t for path, t in state.tensors.items() if path.startswith("model/")}
    if model.keys() != reference.model().keys():
        changed = sorted(model.keys() ^ reference.model().keys())
        raise ConfigError("model", f"the checkpoint does not fit the job in the file as it is now: {changed[0]}")
    reference.load(model)
    names = {id(p): name for name, p in reference.parameters.items()}
    order = [names[id(p)] for group in reference.optimizer.param_groups for p in group["params"]]
    saved = state.values["optimizer"]
    entries: dict[int, dict[str, Any]] = {order.index(name): dict(plain) for name, plain in saved["plain"].items()}
    for path, tensor in state.tensors.items():
        if path.startswith("optimizer/"):
            name, _, key = path.removeprefix("optimizer/").rpartition("/")
            entries.setdefault(order.index(name), {})[key] = tensor
    groups = [{**group, "params": [order.index(name) for name in group["params"]]} for group in saved["groups"]]
    reference.optimizer.load_state_dict({"state": entries, "param_groups": groups})
    if reference.schedule is not None and state.values.get("schedule") is not None:
        reference.schedule.load_state_dict(state.values["schedule"])
    reference.set_grids(state.values.get("grid"))
