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
from echelon.events import Emit, event
from echelon.job import Job
from echelon.state import State


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on: after how many steps, with which last loss, and what there is to say about it."""

    step: int = 0
    loss: float | None = None
    messages: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run. Every worker has them; rank 0 alone reads and writes, for all. `name` is what people
    call the folder `run`.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        identity: dict[str, Any],
        keep: int,
        group: Group,
        agreement: Agreement,
        *,
        tell: Emit,
    ) -> None:
        self._name = name
        self._identity = identity
        self._group = group
        self._agreement = agreement
        self._tell = tell
        self._paused_s: dict[int, float] = {}
        self._keeper = Keeper(run / "checkpoints", keep) if group.rank == 0 else None
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
            return Resumed(messages=(*messages, f"nothing to resume in {self._name}; starting anew"))
        messages += check_identity(state, self._identity)
        self._agreement.restore(state)
        self._newest, self._loss = state.step, state.values.get("loss")
        return Resumed(step=state.step, loss=self._loss, messages=tuple(messages))

    def save(self, loss: float | None, *, wait: bool = True) -> None:
        """Write the committed state, unless that is on disk already. `saving` is told before, `checkpoint` when it is
        on the disk: at the next `tell_finished` if this does not wait for it.

        A checkpoint of the same step that this run has neither written nor gone on from is replaced: it may be corrupt.
        """
        self._loss = loss
        if self._keeper is not None and wait:
            self._keeper.wait()
            self.tell_finished()
        state = self._state()
        if state.step == self._newest:
            return
        lost = without_value(state)
        if lost is not None:  # every worker finds it: they hold the same weights
            raise Diverged(state.step, f"{lost} is NaN and was not saved; go on from an earlier step with --resume")
        if self._keeper is not None:
            self._write(self._keeper, state, wait)
        self._newest = state.step

    def _write(self, keeper: Keeper, state: State, wait: bool) -> None:
        self._tell(event("saving", step=state.step))
        began = time.perf_counter()
        try:
            if wait:
                keeper.save_now(state)
            else:
                keeper.save(state)
        finally:
            self._paused_s[state.step] = time.perf_counter() - began
        self.tell_finished()

    def tell_finished(self) -> None:
        """Tell of the checkpoints that have reached the disk: what writing took, and for how long training paused."""
        for written in self._keeper.finished() if self._keeper is not None else ():
            self._tell(
                event(
                    "checkpoint",
                    step=written.step,
                    path=str(Path(self._name, "checkpoints", written.path.name)),
                    seconds=written.seconds,
                    paused_seconds=self._paused_s.pop(written.step),
                )
            )

    def save_before_failing(self, loss: float | None) -> None:
        """Save what was committed before a step that diverged. Whoever fails first ends all, so everybody waits for
        rank 0. Weights that are NaN are not saved: they would hide the checkpoint before them.
        """
        try:
            self.save(loss)
        except Diverged as error:
            self._tell(event("warning", message=str(error)))
        self._group.gather(None, "saving what was committed")

    def close(self) -> None:
        if self._keeper is not None:
            try:
                self._keeper.close()
            finally:
                self.tell_finished()

    def _state(self) -> State:
        state = self._agreement.export()
        state.values |= self._identity | {"loss": self._loss}
        return state


def without_value(state: State) -> str | None:
    """The first weight that holds a NaN. Without exact mode a gradient that is no number shows only there."""
    for path, tensor in state.tensors.items():
        kind, _, name = path.partition("/")
        # Types of one byte have no isnan; nobody trains in them.
        if kind == "model" and tensor.is_floating_point() and tensor.itemsize > 1 and bool(tensor.isnan().any()):
            return name
    return None


def identity(job: Job, size: int, exact: bool, data: str) -> dict[str, Any]:
    """What a checkpoint says of the job it belongs to. Only what the data position hangs on must stay the same. `data`
    is the fingerprint of the dataset.
    """
    return {
        "job": {"seed": job.seed, "batch": job.batch, "slices": job.slices, "dataset": size},
        "exact": exact,
        "data": data,
        "random": {"seed": job.seed, "rule": "every step's, slice's and sample's state follows from the seed"},
    }


def check_identity(state: State, identity: dict[str, Any]) -> list[str]:
    """Refuse a checkpoint whose data position would mean something else in this job; what else is to be said."""
    mine = identity["job"]
    for name, saved in (state.values.get("job") or {}).items():
        if saved != mine.get(name):
            raise ConfigError(
                name,
                f"the checkpoint was made with {name}={saved} and the job has {mine.get(name)}; "
                "set it back, or start anew with another --out",
            )
    if state.values.get("data") in (None, identity["data"]):
        return []
    why = "the dataset has as many samples as the checkpoint was made from, but other ones"
    return [f"{why}; training goes on with them. Should they be the same: is it drawn at random without a seed?"]


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
