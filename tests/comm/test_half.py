"""Half precision over every topology: summed in float32, rounded once, and the same bits on every rank."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.ranks import check, run_ranks
from echelon.comm import Options
from echelon.comm.collectives import TOPOLOGIES

HALF = (torch.bfloat16, torch.float16)
NUMEL = 20_011


def drawn(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).to(dtype)


def is_rounded_once(got: Tensor, inputs: list[Tensor], divided_by: int = 1) -> Tensor:
    """Between what float32 may have found in any order, each rounded to the type: n - 1 roundings of the sizes' sum."""
    stacked = torch.stack(inputs).double()
    exact = stacked.sum(0) / divided_by
    room = len(inputs) * 2**-24 * stacked.abs().sum(0) / divided_by
    low, high = ((exact + sign * room).to(got.dtype) for sign in (-1, 1))
    return ((low <= got) & (got <= high)).all()


@pytest.mark.parametrize(("ranks", "on_each"), [(2, 2), (2, 1), (3, 3), (3, 2), (4, 4), (4, 2)])
def test_sums_and_means_are_rounded_once(tmp_path, spread, ranks, on_each):
    spread(on_each)

    def work(rank: int) -> None:
        for topology in (*TOPOLOGIES, None):
            group = dist.new_group(list(range(ranks)), pg_options=Options(topology=topology))
            for dtype in HALF:
                inputs = [drawn(other, dtype) for other in range(ranks)]
                for op, parts in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, ranks)):
                    check_all(rank, inputs, op, parts, group)

    check(run_ranks(tmp_path, ranks, work))


def check_all(rank: int, inputs: list[Tensor], op: dist.ReduceOp, parts: int, group: dist.ProcessGroup) -> None:
    ranks = len(inputs)
    x = inputs[rank].clone()
    dist.all_reduce(x, op, group=group)
    assert is_rounded_once(x, inputs, parts)
    rows = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(rows, x, group=group)
    assert all(torch.equal(row, x) for row in rows)
    x = inputs[rank].clone()
    dist.reduce(x, ranks - 1, op, group=group)
    assert is_rounded_once(x, inputs, parts) if rank == ranks - 1 else torch.equal(x, inputs[rank])
    share = torch.empty(NUMEL // ranks, dtype=x.dtype)
    cut = [one[: share.numel() * ranks] for one in inputs]
    dist.reduce_scatter_tensor(share, cut[rank], op, group=group)
    assert is_rounded_once(share, [one.chunk(ranks)[rank] for one in cut], parts)


@pytest.mark.parametrize("topology", [*TOPOLOGIES, None])
def test_what_is_infinite_or_no_number_is_passed_on_without_a_word(tmp_path, topology):
    """As in gloo: a loss scaler counts on finding it in the gradients."""

    def work(rank: int) -> None:
        warnings.simplefilter("error")
        for dtype in (*HALF, torch.float32, torch.float64):
            largest, infinite = torch.finfo(dtype).max, float("inf")
            values = [largest, infinite, infinite if rank else -infinite, float("nan") if rank else 1.0]
            x = torch.tensor(values * 100, dtype=dtype)
            dist.all_reduce(x)
            found = x.view(-1, 4)
            assert (found[:, :2] == infinite).all(), (dtype, found[0])
            assert found[:, 2:].isnan().all(), (dtype, found[0])

    check(run_ranks(tmp_path, 3, work, topology=topology))
