"""What a call is said to move, before it runs: the formulas of the literature, and what the meter then counts."""

from __future__ import annotations

from math import ceil

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from comm.ranks import check, run_ranks
from echelon.comm.collectives import TOPOLOGIES
from echelon.comm.cost import messages_of_send, predict, predict_all_to_all
from echelon.comm.frame import EAGER_BYTES, FRAME_BYTES

ranks = st.integers(2, 24)
units = st.integers(1, 50)


def one_host(n: int) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(n)),)


@given(ranks, units)
def test_ring_and_direct_all_reduce_send_two_n_minus_one_nth_from_each(n, unit):
    for topology in ("ring", "direct"):
        cost = predict("all_reduce", hosts=one_host(n), numel=n * unit * 16 * 64, topology=topology)
        size = n * unit * 16 * 64 * 4
        assert [cost.size_bytes(rank) for rank in range(n)] == [2 * (n - 1) * size // n] * n


@given(ranks, st.integers(0, 100_000))
def test_no_topology_sends_less_than_direct_and_star_sends_two_n_minus_one(n, numel):
    least = 2 * (n - 1) * numel * 4
    for topology in TOPOLOGIES:
        total = predict("all_reduce", hosts=one_host(n), numel=numel, topology=topology).size_bytes()
        assert total >= least
        if topology in ("star", "direct", "ring"):
            assert total == least


@given(ranks, units)
def test_a_tree_of_a_power_of_two_is_as_cheap_as_a_ring(n, unit):
    n = 1 << (n.bit_length() - 1)
    cost = predict("all_reduce", hosts=one_host(n), numel=n * unit * 1024, topology="tree")
    assert [cost.size_bytes(rank) for rank in range(n)] == [2 * (n - 1) * unit * 1024 * 4] * n
    assert sum(load.messages for load in cost.sent_by(0).values()) >= 2 * (n.bit_length() - 1)


@given(ranks, st.integers(1, 100_000))
def test_guests_of_a_tree_send_everything_once_and_all_together_no_more_than_a_ring(n, numel):
    cost = predict("all_reduce", hosts=one_host(n), numel=numel, topology="tree")
    inner = 1 << (n.bit_length() - 1)
    for guest in range(inner, n):
        assert cost.size_bytes(guest) == numel * 4
        assert set(cost.sent_by(guest)) == {guest - inner}
    assert cost.size_bytes() == 2 * (n - 1) * numel * 4


@given(st.integers(2, 6), st.integers(2, 5), st.integers(0, 100_000))
def test_between_hosts_hier_sends_what_single_ranks_would(hosts, each, numel):
    spread = tuple(tuple(range(host * each, (host + 1) * each)) for host in range(hosts))
    cost = predict("all_reduce", hosts=spread, numel=numel, topology="hier")
    between = {pair: load for pair, load in cost.between().items() if load.transport == "tcp"}
    assert sum(load.size_bytes for load in between.values()) == 2 * (hosts - 1) * numel * 4
    assert {rank for pair in between for rank in pair} == {host * each for host in range(hosts)}


@given(ranks, st.integers(0, 100_000), st.data())
def test_one_to_all_and_all_to_one_send_n_minus_one(n, numel, data):
    root = data.draw(st.integers(0, n - 1))
    for kind in ("broadcast", "reduce", "gather", "scatter"):
        for topology in ("star", "ring", "tree", "hier"):
            cost = predict(kind, hosts=one_host(n), numel=numel, topology=topology, root=root)
            assert cost.size_bytes() == (n - 1) * numel * 4
    assert predict("barrier", hosts=one_host(n), numel=0).size_bytes() == 0


@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=12))
def test_uneven_all_gather_sends_every_row_to_everybody_else(rows):
    n = len(rows)
    direct = predict("all_gather", hosts=one_host(n), numel=rows)
    assert [direct.size_bytes(rank) for rank in range(n)] == [(n - 1) * row * 4 for row in rows]
    ring = predict("all_gather", hosts=one_host(n), numel=rows, topology="ring")
    assert ring.size_bytes() == direct.size_bytes()
    assert [ring.size_bytes(rank) for rank in range(n)] == [4 * (sum(rows) - rows[(rank + 1) % n]) for rank in range(n)]


@given(ranks, units)
def test_half_precision_costs_twice_where_partial_sums_travel_and_nothing_where_none_do(n, unit):
    numel = n * unit * 1024
    direct = predict("all_reduce", hosts=one_host(n), numel=numel, topology="direct", itemsize=2, half=True)
    assert direct.size_bytes() == 2 * (n - 1) * numel * 2
    ring = predict("all_reduce", hosts=one_host(n), numel=numel, topology="ring", itemsize=2, half=True)
    # The first of the n - 1 phases of adding carries single contributions, the others sums of several.
    share = numel // n
    assert ring.size_bytes(0) == share * (2 + 4 * (n - 2) + 2 * (n - 1))


@given(st.integers(0, 5_000_000))
def test_messages_are_frames_and_one_announces_a_large_message(size):
    star = predict("broadcast", hosts=one_host(2), numel=size, itemsize=1)
    assert star.sent_by(0)[1].messages == max(1, ceil(size / FRAME_BYTES))
    assert messages_of_send(size) == (1 if size <= EAGER_BYTES else 1 + ceil(size / FRAME_BYTES))


def test_a_group_of_one_sends_nothing():
    assert predict("all_reduce", hosts=((0,),), numel=1000).transfers == ()


# On real processes: what was predicted is what is counted, on every rank and to every peer.

SIZES = [0, 1, 7, 70_001, 300_007]
DTYPES = {
    "float32": (4, False),
    "bfloat16": (2, True),
    "float16": (2, True),
    "float64": (8, False),
    "uint8": (1, False),
}


def metered(call) -> dict[str, list[object]]:
    """What a call counted, by peer, and what it said beforehand; JSON."""
    group = dist.group.WORLD
    before = group.traffic
    work = call()
    if work is not None:
        work.wait()
    rows = (group.traffic - before).sent
    said = sum(operation.predicted_bytes for operation in work._operations) if work is not None else None
    return {"said": said, "rows": {str(r.peer): [r.transport, r.size_bytes, r.messages] for r in rows}}


def expected(cost, rank: int) -> dict[str, list[object]]:
    return {str(dst): [x.transport, x.size_bytes, x.messages] for dst, x in cost.sent_by(rank).items()}


def every_collective(rank: int, n: int, hosts, topology: str | None):
    """Calls to make, and what they should cost."""
    for name, (itemsize, half) in DTYPES.items():
        dtype = getattr(torch, name)
        common = {"hosts": hosts, "itemsize": itemsize, "half": half, "topology": topology}
        for size in SIZES if itemsize in (2, 4) else SIZES[-1:]:
            mine = torch.ones(size, dtype=dtype)
            yield lambda m=mine: dist.all_reduce(m, async_op=True), predict("all_reduce", numel=size, **common)
            whole, rows = torch.ones(n * size, dtype=dtype), [torch.empty_like(mine) for _ in range(n)]
            yield (
                lambda m=mine, w=whole: dist.reduce_scatter_tensor(m, w, async_op=True),
                predict("reduce_scatter", numel=size, **common),
            )
            yield (
                lambda m=mine, w=whole: dist.all_gather_into_tensor(w, m, async_op=True),
                predict("all_gather", numel=size, **common),
            )
            for root in range(n) if size in (7, 70_001) and itemsize == 2 else [n - 1]:
                at = {"group_src": root, "async_op": True}
                to = {"group_dst": root, "async_op": True}
                yield (
                    lambda m=mine, at=at: dist.broadcast(m, **at),
                    predict("broadcast", numel=size, root=root, **common),
                )
                yield lambda m=mine, to=to: dist.reduce(m, **to), predict("reduce", numel=size, root=root, **common)
                given = rows if rank == root else None
                yield (
                    lambda m=mine, g=given, to=to: dist.gather(m, g, **to),
                    predict("gather", numel=size, root=root, **common),
                )
                yield (
                    lambda m=mine, g=given, at=at: dist.scatter(m, g, **at),
                    predict("scatter", numel=size, root=root, **common),
                )


def uneven(rank: int, n: int, hosts, topology: str | None):
    counts = [[(7919 * i + 104_729 * j) % 90_000 for j in range(n)] for i in range(n)]
    back = [counts[i][rank] for i in range(n)]
    out, whole = torch.empty(sum(back)), torch.ones(sum(counts[rank]))
    yield (
        lambda: dist.all_to_all_single(out, whole, back, counts[rank], async_op=True),
        predict_all_to_all(hosts=hosts, numel=counts),
    )
    rows = [torch.empty(30_000 * place) for place in range(n)]
    yield (
        lambda: dist.all_gather(rows, torch.ones(30_000 * rank), async_op=True),
        predict("all_gather", hosts=hosts, numel=[30_000 * place for place in range(n)], topology=topology),
    )
    yield lambda: dist.barrier(async_op=True), predict("barrier", hosts=hosts, numel=0, topology=topology)


@pytest.mark.parametrize("topology", [None, *TOPOLOGIES])
@pytest.mark.parametrize(("n", "on_each"), [(2, 2), (3, 3), (2, 1), (4, 2), (3, 2)])
def test_the_meter_counts_what_was_predicted(tmp_path, spread, n, on_each, topology):
    spread(on_each)
    hosts = tuple(tuple(range(at, min(at + on_each, n))) for at in range(0, n, on_each))

    def work(rank: int) -> int:
        checked = 0
        for make in (every_collective, uneven):
            for call, cost in make(rank, n, hosts, topology):
                found, should = metered(call), expected(cost, rank)
                assert found["rows"] == should, (cost.shape, found, should)
                assert found["said"] == cost.size_bytes(rank), (cost.shape, found)
                checked += 1
        return checked

    assert min(check(run_ranks(tmp_path, n, work, topology=topology))) > 60


@pytest.mark.parametrize("on_each", [1, 2])
def test_messages_cost_what_they_were_predicted_to(tmp_path, spread, on_each):
    spread(on_each)

    def work(rank: int) -> None:
        for size in (0, 1, EAGER_BYTES, EAGER_BYTES + 1, FRAME_BYTES, 3 * FRAME_BYTES + 1):
            data = torch.ones(size, dtype=torch.uint8)
            found = metered(lambda: dist.isend(data, 1) if rank == 0 else dist.irecv(data, 0))  # noqa: B023
            row = ["shm" if on_each == 2 else "tcp", size, messages_of_send(size)]
            assert found == {"said": size if rank == 0 else 0, "rows": {"1": row} if rank == 0 else {}}

    check(run_ranks(tmp_path, 2, work))
