"""A run's checkpoints: saving what is committed, and going on from it, on workers that have no copy of it, too."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.agree import Agreement
from echelon.checkpoint import Keeper, pack, unpack
from echelon.checkpoint.folder import snapshot
from echelon.comm import Group
from echelon.errors import ConfigError, Diverged
from echelon.events import Event, event
from echelon.job import Job
from echelon.state import State


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on: after how many steps, with which last loss, and what there is to say about it."""

    step: int = 0
    loss: float | None = None
    messages: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run. Every worker has them; rank 0 alone reads and writes, for all."""

    def __init__(self, run: Path, job: Job, size: int, exact: bool, group: Group, agreement: Agreement) -> None:
        self._run = run
        self._job = job
        self._size = size
        self._exact = exact
        self._group = group
        self._agreement = agreement
        self._keeper = Keeper(run / "checkpoints", job.keep) if group.rank == 0 else None
        self._newest: int | None = None
        self._loss: float | None = None
        self.check()

    def check(self) -> None:
        """Refuse what cannot be saved: before anything is computed, and when the optimizer has made its state."""
        try:
            snapshot(self._state())
        except ConfigError as error:
            raise ConfigError(*_in_words(error)) from error

    def resume(self) -> Resumed:
        """Go on from the newest sound checkpoint, if there is one."""
        messages: list[str] = []
        found = self._keeper.latest(messages.append) if self._keeper is not None else None
        state = share_state(found, self._group)
        if state is None:
            return Resumed(messages=(*messages, f"nothing to resume in {self._run}; starting anew"))
        check_identity(state, self._job, self._size)
        self._agreement.restore(state)
        self._newest, self._loss = state.step, state.values.get("loss")
        return Resumed(step=state.step, loss=self._loss, messages=tuple(messages))

    def save(self, loss: float | None, *, wait: bool = True) -> Event | None:
        """Write the committed state, unless that is on disk already; the event that tells of it.

        A checkpoint of the same step that this run has neither written nor gone on from is replaced: it may be corrupt.
        """
        self._loss = loss
        if self._keeper is not None and wait:
            self._keeper.wait()
        state = self._state()
        if state.step == self._newest:
            return None
        lost = without_value(state)
        if lost is not None:  # every worker finds it: they hold the same weights
            raise Diverged(state.step, f"{lost} is NaN and was not saved; go on from an earlier step with --resume")
        if self._keeper is None:
            self._newest = state.step
            return None
        began = time.perf_counter()
        if wait:
            self._keeper.save_now(state)
        else:
            self._keeper.save(state)
        self._newest = state.step
        path = str(self._run / "checkpoints" / f"step-{state.step:08d}")
        return event("checkpoint", step=state.step, path=path, seconds=time.perf_counter() - began)

    def save_before_failing(self, loss: float | None) -> Event | None:
        """Save what was committed before a step that diverged. Whoever fails first ends all, so everybody waits for
        rank 0. Weights that are NaN are not saved: they would hide the checkpoint before them.
        """
        try:
            saved = self.save(loss)
        except Diverged as error:
            saved = event("warning", message=str(error))
        self._group.gather(None, "saving what was committed")
        return saved

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    def _state(self) -> State:
        state = self._agreement.export()
        state.values |= identity(self._job, self._size, self._exact) | {"loss": self._loss}
        return state


def without_value(state: State) -> str | None:
    """The first weight that holds a NaN. Without exact mode a gradient that is no number shows only there."""
    for path, tensor in state.tensors.items():
        kind, _, name = path.partition("/")
        # Types of one byte have no isnan; nobody trains in them.
        if kind == "model" and tensor.is_floating_point() and tensor.itemsize > 1 and bool(tensor.isnan().any()):
            return name
    return None


def identity(job: Job, size: int, exact: bool) -> dict[str, Any]:
    """What a checkpoint says of the job it belongs to. Only what the data position hangs on must stay the same."""
    return {
        "job": {"seed": job.seed, "batch": job.batch, "slices": job.slices, "dataset": size},
        "exact": exact,
        "random": {"seed": job.seed, "rule": "every step's, slice's and sample's state follows from the seed"},
    }


def check_identity(state: State, job: Job, size: int) -> None:
    """Refuse a checkpoint whose data position would mean something else in this job."""
    mine = identity(job, size, exact=False)["job"]
    for name, saved in state.values.get("job", {}).items():
        if saved != mine[name]:
            raise ConfigError(
                name,
                f"the checkpoint was made with {name}={saved} and the job has {mine[name]}; "
                "set it back, or start anew with another --out",
            )


def share_state(state: State | None, group: Group) -> State | None:
    """Give every rank the state that rank 0 has read."""
    outline, tensors = None, dict[str, Tensor]()
    if state is not None:
        inside: dict[str, Tensor] = {}
        packed = pack(state.values, inside)
        tensors = {**state.tensors, **inside}
        shapes = {path: [str(t.dtype).removeprefix("torch."), list(t.shape)] for path, t in tensors.items()}
        outline = {"step": state.step, "tensors": shapes, "inside": sorted(inside), "values": packed}
    outline = group.gather(outline, "sharing the checkpoint")[0]
    if outline is None:
        return None
    found = {}
    for path, (dtype, shape) in outline["tensors"].items():
        tensor = tensors[path] if state is not None else torch.empty(shape, dtype=getattr(torch, dtype))
        on_wire = tensor.to(group.device)
        group.broadcast(on_wire, "sharing the checkpoint")
        found[path] = on_wire if tensor.device == on_wire.device else on_wire.cpu()
    among_values = {path: found.pop(path) for path in outline["inside"]}
    return State(step=outline["step"], tensors=found, values=unpack(outline["values"], among_values))


def _in_words(error: ConfigError) -> tuple[str, str]:
    """Whose value it is that cannot be saved, for one who knows nothing of how a state is kept."""
    match re.findall(r"\['([^']*)'\]", error.term):
        case ["optimizer", "plain", parameter, key, *_]:
            return "optimizer", f"its state {key!r} of {parameter} cannot be kept in a checkpoint: {error.why}"
        case [("optimizer" | "schedule") as whose, *path]:
            return whose, f"its state {'.'.join(path)!r} cannot be kept in a checkpoint: {error.why}"
    return error.term, error.why
