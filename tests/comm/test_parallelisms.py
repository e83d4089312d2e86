"""What PyTorch builds on a backend trains the same on ours as on gloo: every parallelism, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from comm.ranks import check, run_ranks

WIDTH, HIDDEN, BRANCHES, BATCH, STEPS, RATE = 16, 48, 4, 24, 4, 0.1
Values = dict[str, Tensor]
"""What a rank ends with, and its losses."""


class Branch(nn.Module):
    """Two layers that are added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Four branches; in training on odd steps the second can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(Branch() for _ in range(BRANCHES))
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        for place, branch in enumerate(self.branches):
            if not (self.skip and place == 1):
                x = branch(x)
        return x


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """A share of a step's samples."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    rows = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    return x[rows], torch.roll(x, 1, 1)[rows].tanh()


def train(model: nn.Module, part: int = 0, parts: int = 1, *, inner: Model | None = None) -> Values:
    """A few steps; `inner` leaves a branch out on odd steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        if inner is not None:
            inner.skip = step % 2 == 1
        x, y = batch(step, part, parts)
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        assert all((local(p.grad).abs() < 1).all() for p in model.parameters() if p.grad is not None)  # see tolerance
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return {"losses": torch.stack(losses), **whole(model)}


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def whole(model: nn.Module) -> Values:
    """A model's parameters, gathered where they are cut."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state(model).items()}


def state(model: nn.Module) -> Values:
    return {name: value.detach() for name, value in model.state_dict().items()}


def in_bfloat16(process_group, bucket):
    """torch's own hook, by a name that it does not refuse on a CPU."""
    return default_hooks._compress_hook(torch.bfloat16, process_group, bucket)


def ddp(rank: int, folder: Path, *, hook: Any = None, skips: bool = False, **options: Any) -> Values:
    inner = Model()
    model = DistributedDataParallel(inner, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return train(model, rank, dist.get_world_size(), inner=inner if skips else None)


def compiled(rank: int, folder: Path) -> Values:
    """The reducer calls the group within what is compiled."""
    model = torch.compile(DistributedDataParallel(Model()), backend="aot_eager")
    return train(model, rank, dist.get_world_size())


def shard(model: Model, mesh: Any = None, **options: Any) -> Model:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for branch in model.branches:
        fully_shard(branch, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def sharded(rank: int, folder: Path, **options: Any) -> Values:
    return train(shard(Model(), **options), rank, dist.get_world_size())


def sharded_flat(rank: int, folder: Path, **options: Any) -> Values:
    """The first FSDP, which gives back the memory of what it has gathered."""
    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True, **options)
    return train(model, rank, dist.get_world_size())


def cut_tensors(model: nn.Module, mesh: Any) -> None:
    for branch in model.branches:
        parallelize_module(branch, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel(rank: int, folder: Path) -> Values:
    model = Model()
    cut_tensors(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(model)


def on_a_mesh(rank: int, folder: Path) -> Values:
    """Data parallel across, tensor parallel inside: half the ranks each way."""
    across = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (across, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    cut_tensors(model, mesh["tp"])
    shard(model, mesh["dp"])
    return train(model, mesh["dp"].get_local_rank(), across)


def pipelined(rank: int, folder: Path, *, schedule: Callable[..., Any]) -> Values:
    """A stage a rank, branches dealt out; six micro-batches."""
    stages = dist.get_world_size()
    mine = nn.Sequential(*(b for place, b in enumerate(Model().branches) if place * stages // BRANCHES == rank))
    pipe = schedule(PipelineStage(mine, rank, stages, torch.device("cpu")), n_microbatches=6, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE)
    losses: list[Tensor] = []
    for step in range(STEPS):
        x, y = batch(step)
        pipe.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == stages - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack([loss.detach() for loss in losses]) if losses else torch.zeros(0), **state(mine)}


def saved_and_loaded(rank: int, folder: Path) -> Values:
    """What is saved in shards of the one kind is loaded into shards of another."""
    model = shard(Model())
    values = train(model, rank, dist.get_world_size())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "checkpoint")
    other = Model()
    cut_tensors(other, init_device_mesh("cpu", (dist.get_world_size(),)))
    found = {"model": other.state_dict()}
    dcp.load(found, checkpoint_id=folder / "checkpoint")
    other.load_state_dict(found["model"])
    got = whole(other)
    assert all(torch.equal(got[name], value) for name, value in values.items() if name != "losses")
    return values


def saved_beside(rank: int, folder: Path) -> Values:
    """Saved while training goes on; and what rank 0 holds in full is loaded into the shards of all."""
    model = shard(Model())
    beside = dist.new_group(backend=dist.get_backend())
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "checkpoint", process_group=beside)
    values = train(model, rank, dist.get_world_size())
    saving.result()
    other = shard(Model())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(
        other, {k: v for k, v in values.items() if k != "losses"} if rank == 0 else {}, options=options
    )
    got = whole(other)
    assert all(torch.equal(got[name], value) for name, value in values.items() if name != "losses")
    return values


SINGLE, HALF, BFLOAT = 2**-24, 2**-11, 2**-8
"""How far, of its size, a value is rounded at most."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every rank does; how its sums are rounded, of how many values they are (0: one a rank) and
    how many come after one another; on how many ranks it runs.
    """

    run: Callable[..., Values]
    options: dict[str, Any] = field(default_factory=dict)
    rounding: float = SINGLE
    summands: int = 0
    sums: int = 1
    ranks: tuple[int, ...] = (2, 3)


def mixed(sums_in: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=sums_in)}


CASES = {
    "DDP": Case(run=ddp),
    "DDP in small buckets": Case(run=ddp, options={"bucket_cap_mb": 0.005}),
    "DDP with unused parameters": Case(run=ddp, options={"skips": True, "find_unused_parameters": True}),
    "DDP with gradients as views": Case(run=ddp, options={"gradient_as_bucket_view": True}),
    "DDP in bfloat16": Case(run=ddp, options={"hook": in_bfloat16}, rounding=BFLOAT),
    "DDP in float16": Case(run=ddp, options={"hook": default_hooks.fp16_compress_hook}, rounding=HALF),
    "DDP, compiled": Case(run=compiled, ranks=(2,)),
    "FSDP": Case(run=sharded),
    "FSDP, flat": Case(run=sharded_flat),
    "FSDP, flat, gradients only": Case(
        run=sharded_flat, options={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, ranks=(2,)
    ),
    "FSDP that keeps what it gathered": Case(run=sharded, options={"reshard_after_forward": False}),
    "FSDP in bfloat16": Case(run=sharded, options=mixed(torch.bfloat16), rounding=BFLOAT),
    "FSDP in bfloat16 that sums wide": Case(run=sharded, options=mixed(torch.float32), rounding=BFLOAT),
    "tensor parallel": Case(run=tensor_parallel, sums=2 * BRANCHES),
    "a mesh": Case(run=on_a_mesh, summands=2, ranks=(4,)),
    "pipeline, GPipe": Case(run=pipelined, options={"schedule": ScheduleGPipe}, summands=1),
    "pipeline, 1F1B": Case(run=pipelined, options={"schedule": Schedule1F1B}, summands=1),
    "checkpoint": Case(run=saved_and_loaded),
    "checkpoint beside training": Case(run=saved_beside),
}


def tolerance(case: Case, ranks: int) -> float:
    """How far two trainings may be apart that add in another order.

    A sum of n values is rounded n - 1 times, so two orders differ by at most 2 (n - 1) roundings of what the sizes of
    the values add up to, and by two more where the outcome is rounded again to be read. A path through the model
    crosses `sums` of them. Gradients here are below one, so a step moves a parameter by RATE times that; and what has
    moved moves later gradients by less than itself, which over these few steps at most doubles it. A parameter is also
    rounded itself in each step. Two values add up to the same in either order.
    """
    n = case.summands or ranks
    return 0 if n <= 2 else 2 * STEPS * (RATE * case.sums * 2 * n * case.rounding + SINGLE)


def values_on(folder: Path, backend: str, ranks: int, case: Case) -> list[Values]:
    place = folder / backend
    place.mkdir()

    def work(rank: int) -> None:
        values = case.run(rank, place, **case.options)
        torch.save({key: value.clone() for key, value in values.items()}, place / f"values-{rank}")

    check(run_ranks(place, ranks, work, backend=backend))
    return [torch.load(place / f"values-{rank}") for rank in range(ranks)]


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, case in CASES.items() for ranks in case.ranks])
def test_a_model_is_trained_as_on_gloo(tmp_path, name, ranks):
    case = CASES[name]
    ours, theirs = (values_on(tmp_path, backend, ranks, case) for backend in ("echelon", "gloo"))
    atol = tolerance(case, ranks)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=atol)
    trained = torch.cat([one["losses"] for one in ours]).view(-1)
    assert trained.isfinite().all()
    assert trained[-1] < trained[0]
