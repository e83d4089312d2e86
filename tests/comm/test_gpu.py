"""CUDA tensors: who carries them is agreed on by all ranks; on a machine with a GPU, that they arrive.

Where two ranks share a GPU, as all do on a machine with one, tensors go through the host's memory.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm.ranks import check, run_ranks
from echelon.comm import gpu
from echelon.comm.traffic import Traffic
from echelon.errors import Timeout

SOON = timedelta(seconds=5)
needs_gpu = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs an NVIDIA GPU")


class Recorder:
    """Stands for a group of another backend, and says what it was asked."""

    def __init__(self):
        self.asked = []

    def allreduce(self, tensors, opts=None):
        self.asked.append(("allreduce", len(tensors), opts))
        return "its work"


class Ours:
    """A group that sends what is not on the CPU elsewhere, if there is another."""

    def __init__(self, other):
        self.traffic = Traffic()
        self.gpus = gpu.Gpus(dist.HashStore(), 0, [0], SOON, self.traffic, make=lambda *_: other)

    @gpu.routed
    def allreduce(self, tensors, opts=None):
        return "our work"


def test_a_tensor_goes_where_its_device_has_a_group():
    other = Recorder()
    on_cpu, away = torch.ones(2), torch.ones(2, device="meta")
    assert Ours(other).allreduce([on_cpu], 1) == "our work"
    assert Ours(None).allreduce([away], 1) == "our work"
    ours = Ours(other)
    assert ours.allreduce([away, away], 7) == "its work"
    assert other.asked == [("allreduce", 2, 7)]
    assert [row.transport for row in ours.traffic.snapshot().sent] == ["nccl"]


@pytest.mark.parametrize("found", [[], [[]], [None, 3], "text"])
def test_arguments_without_a_tensor_have_no_first(found):
    assert gpu.first_tensor(found) is None


def agree(monkeypatch, gpus):
    """What each rank finds, given the GPU that it says it is on."""
    store, found = dist.HashStore(), {}
    said = threading.local()
    monkeypatch.setattr(gpu, "identity", lambda _device: said.gpu)

    def ask(rank):
        said.gpu = gpus[rank]
        group = gpu.Gpus(
            store, rank, range(len(gpus)), SOON, Traffic(), make=lambda _store, rank, *_: f"group of {rank}"
        )
        away = torch.ones(1, device="meta")
        found[rank] = [group.group_for([away]), group.group_for([away])]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(len(gpus))]


def test_ranks_with_a_gpu_each_use_it_and_ranks_that_share_one_do_not(monkeypatch):
    assert agree(monkeypatch, ["a", "b", "c"]) == [[f"group of {rank}"] * 2 for rank in range(3)]
    assert agree(monkeypatch, ["a", "b", "a"]) == [[None] * 2] * 3


def test_a_rank_that_never_says_which_gpu_it_has_is_named():
    group = gpu.Gpus(dist.HashStore(), 0, [4, 7], timedelta(seconds=0.2), Traffic(), make=lambda *_: None)
    with pytest.raises(Timeout, match="rank 7"):
        group.group_for([torch.ones(1, device="meta")])


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_ranks_that_share_a_gpu_exchange_tensors_through_the_host(tmp_path, dtype):
    def work(rank):
        here = torch.device("cuda", 0)
        mine = torch.arange(70_000, device=here).to(dtype) + rank
        whole = mine.clone()
        dist.all_reduce(whole)
        rows = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(rows, mine)
        share = torch.empty(35_000, dtype=dtype, device=here)
        dist.reduce_scatter_tensor(share, mine)
        turned = torch.empty_like(mine)
        dist.all_to_all_single(turned, mine)
        given = (
            mine.reshape(7, -1).t().clone().t() if rank == 0 else torch.empty(10_000, 7, dtype=dtype, device=here).t()
        )
        dist.broadcast(given, 0)
        if rank == 0:
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
        first = torch.arange(70_000, device=here).to(dtype)
        second = first + 1
        total = first + second
        halves = [first.chunk(2)[rank], second.chunk(2)[rank]]
        return [
            torch.equal(whole, total),
            torch.equal(torch.stack(rows), torch.stack([first, second])),
            torch.equal(share, total.chunk(2)[rank]),
            torch.equal(turned, torch.cat(halves)),
            torch.equal(given, first.reshape(7, -1)),
            torch.equal(mine, first),
        ]

    assert check(run_ranks(tmp_path, 2, work)) == [[True] * 6] * 2


@needs_gpu
def test_ddp_on_a_shared_gpu_computes_what_one_process_computes(tmp_path):
    def train(net, data):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for batch in data:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 4)).cuda()

    def work(rank):
        torch.manual_seed(1)
        data = torch.randn(5, 8, 16).cuda()
        ours = train(nn.parallel.DistributedDataParallel(make()), data[:, 4 * rank : 4 * rank + 4])
        alone = train(make(), data)
        return max((one - other).abs().max().item() for one, other in zip(ours, alone, strict=True))

    # Sums of float32 in another order, five steps of them.
    assert max(check(run_ranks(tmp_path, 2, work))) < 1e-5


@needs_gpu
def test_a_rank_with_a_gpu_of_its_own_goes_through_nccl(tmp_path):
    def work(_rank):
        tensor, rows = torch.ones(5, device="cuda"), torch.empty(5, device="cuda")
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(rows, tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        group = dist.group.WORLD.gpus.group_for([tensor])
        return [group.name(), tensor.tolist(), rows.tolist()]

    assert check(run_ranks(tmp_path, 1, work)) == [["nccl", [1.0] * 5, [1.0] * 5]]
