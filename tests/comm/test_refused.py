"""What cannot be called is refused where it is called, before anything is sent, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from comm.ranks import check, run_ranks

X = torch.ones(6)
CALLS: dict[str, Callable[[], object]] = {
    "a root that is no member": lambda: dist.broadcast(X, group_src=7),
    "a negative root": lambda: dist.reduce(X, group_dst=-2),
    "a root to gather at that is no member": lambda: dist.distributed_c10d._get_default_group().gather([], [X], 7),
    "a negative tag": lambda: dist.send(X, 1 - dist.get_rank() % 2, tag=-1),
    "a tag that is too large": lambda: dist.recv(X, 1 - dist.get_rank() % 2, tag=1 << 40),
    "a peer that is no member": lambda: dist.send(X, group_dst=7),
    "a receive from no member": lambda: dist.recv(X, group_src=7),
    "a message to oneself": lambda: dist.isend(X, group_dst=dist.get_rank()),
    "a message from oneself": lambda: dist.irecv(X, group_src=dist.get_rank()),
    "too few rows to gather into": lambda: dist.all_gather([torch.ones(6)] * 2, X),
    "too many rows to gather into": lambda: dist.all_gather([torch.ones(6)] * 4, X),
    "a row of another size": lambda: dist.all_gather([torch.ones(5)] * 3, X),
    "an output of another size": lambda: dist.all_gather_into_tensor(torch.ones(17), X),
    "too few rows to sum": lambda: dist.reduce_scatter(torch.ones(6), [X] * 2),
    "too many rows to sum": lambda: dist.reduce_scatter(torch.ones(6), [X] * 4),
    "a sum of another size": lambda: dist.reduce_scatter_tensor(torch.ones(5), torch.ones(18)),
    "too few rows for all": lambda: dist.all_to_all([X] * 2, [X] * 2),
    "too many rows for all": lambda: dist.all_to_all([X] * 4, [X] * 4),
    "rows that do not add up": lambda: dist.all_to_all_single(torch.ones(6), X, [1, 2, 2], [2, 2, 2]),
    "rows that cannot be dealt out": lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5)),
    "a sum of what cannot be added": lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
    "a mean of bool": lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG),
    "bits of what has fractions": lambda: dist.reduce(X, 0, dist.ReduceOp.BXOR),
    "a maximum of sparse tensors": lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_makes_no_sense_is_refused_and_the_group_goes_on(tmp_path, what):
    def work(rank: int) -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            CALLS[what]()
        x = torch.ones(100_000)
        dist.all_reduce(x)
        assert (x == 3).all()
        assert not dist.group.WORLD.driver.fabric.operations
        dist.barrier()
        return str(caught.value)

    assert all(check(run_ranks(tmp_path, 3, work, timeout_s=5)))
