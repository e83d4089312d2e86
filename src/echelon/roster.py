"""Who takes part in a run, and that all of them train one and the same job, from the same weights."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

import echelon
from echelon.assemble import Prepared
from echelon.comm import Group
from echelon.errors import ConfigError
from echelon.job import ENDLESS
from echelon.layout import model_tensors
from echelon.place import arithmetic
from echelon.plan import Plan
from echelon.request import Request


def meet(group: Group, request: Request, prepared: Prepared) -> list[dict[str, Any]]:
    """What each worker says of itself, by rank. Refuses workers that would not train the same."""
    mine = {
        "rank": group.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "run": request.out,
        "arithmetic": arithmetic(),
        "samples": len(prepared.reader),
        "data": prepared.reader.fingerprint(),
        "parameters": [[name, list(p.shape)] for name, p in prepared.module.named_parameters()],
    }
    everybody = group.gather(mine, "meeting the other workers")
    check_alike(everybody, exact=request.exact)
    return everybody


def agree_on_weights(group: Group, module: nn.Module) -> None:
    """Every worker made the model itself; where that gave other weights (a user's own seed), rank 0's count."""
    prints = group.gather(fingerprint(module), "comparing initial weights")
    if len(set(prints)) > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            group.broadcast(tensor.data, "sharing initial weights")


def check_alike(hosts: list[dict[str, Any]], *, exact: bool) -> None:
    """Refuse workers that would not train one and the same job."""
    first = hosts[0]
    for other in hosts[1:]:
        rank = other["rank"]
        if other["samples"] != first["samples"]:
            why = f"rank {rank} has {other['samples']} samples and rank 0 {first['samples']}"
            raise ConfigError("data", f"{why}; every worker needs the same dataset")
        if other["parameters"] != first["parameters"]:
            pairs = zip_longest(other["parameters"], first["parameters"])
            mine, theirs = next((a, b) for a, b in pairs if a != b)
            why = f"rank {rank} has the parameter {_parameter(mine)} where rank 0 has {_parameter(theirs)}"
            raise ConfigError("model", f"{why}; every worker must make the same model (is it made from a set?)")
        if not exact:
            continue
        if other["data"] != first["data"]:
            raise ConfigError("exact", _other_data(rank))
        for what, value in other["arithmetic"].items():
            if value != first["arithmetic"][what]:
                raise ConfigError(
                    "exact",
                    f"rank {rank} computes with {what} {value} and rank 0 with {first['arithmetic'][what]}; "
                    "equal bits need the same on all workers. Use equal machines, or train without --exact",
                )


def _other_data(rank: int) -> str:
    return (
        f"the dataset of rank {rank} holds other samples than that of rank 0: is it drawn at random without a seed, or "
        "made from a set? Make it in data=callable, which is called under the job's seed"
    )


def _parameter(entry: Any) -> str:
    return f"{entry[0]} {tuple(entry[1])}" if entry else "none"


def remarks(hosts: list[dict[str, Any]]) -> tuple[str, ...]:
    """What is no error and should not go unsaid."""
    other = next((host for host in hosts if host["data"] != hosts[0]["data"]), None)
    return (f"{_other_data(other['rank'])}; --exact would refuse it",) if other else ()


def describe(request: Request, prepared: Prepared, hosts: list[dict[str, Any]], committed: int = 0) -> dict[str, Any]:
    """What `job.json` says of a run. `committed`: steps it goes on from; they stay its own if fewer are asked for."""
    return {
        "plan": str(Plan.parse(request.plan)),
        "workers": len(hosts),
        "backend": request.backend,
        "exact": request.exact,
        "seed": prepared.job.seed,
        "batch": prepared.job.batch,
        "slices": prepared.job.slices,
        "steps": None if prepared.job.epochs == ENDLESS else max(prepared.course.total, committed),
        "samples_in_dataset": prepared.course.size,
        "source": request.source,
        "versions": {"python": platform.python_version(), "echelon": echelon.__version__, **hosts[0]["arithmetic"]},
    }


def fingerprint(module: nn.Module) -> str:
    """A hash of a sample of every tensor's values: differs when weights were made differently, and is cheap."""
    code = hashlib.sha256()
    for name, tensor in model_tensors(module).items():
        flat = tensor.flatten()
        stride = max(1, flat.numel() // 4096)
        code.update(name.encode())
        code.update(flat[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return code.hexdigest()
