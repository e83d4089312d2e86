"""Going on from saved state: does it belong to this job, and how do workers that have no copy get it."""

from __future__ import annotations

from typing import Any

import torch

from echelon.checkpoint import pack, unpack
from echelon.comm import Group
from echelon.errors import ConfigError
from echelon.job import Job
from echelon.state import State


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
    outline = None
    if state is not None:
        shapes = {path: [str(t.dtype).removeprefix("torch."), list(t.shape)] for path, t in state.tensors.items()}
        outline = {"step": state.step, "tensors": shapes, "values": pack(state.values)}
    outline = group.gather(outline, "sharing the checkpoint")[0]
    if outline is None:
        return None
    tensors = {}
    for path, (dtype, shape) in outline["tensors"].items():
        tensor = state.tensors[path] if state is not None else torch.empty(shape, dtype=getattr(torch, dtype))
        on_wire = tensor.to(group.device)
        group.broadcast(on_wire, "sharing the checkpoint")
        tensors[path] = on_wire if tensor.device == on_wire.device else on_wire.cpu()
    return State(step=outline["step"], tensors=tensors, values=unpack(outline["values"]))
