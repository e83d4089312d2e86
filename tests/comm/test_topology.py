"""Every collective over every topology, followed piece by piece: the right sums everywhere, and the bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.choose import choose_topology, cut
from echelon.comm.collectives import Shape, moves_of, pieces_of
from echelon.comm.program import Form, forms_of, program_of

KINDS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"]
TOPOLOGIES = ["direct", "ring", "tree", "star", "hier"]
ROOTED = {"broadcast", "reduce", "gather", "scatter"}


@st.composite
def shapes(draw):
    ranks = draw(st.integers(1, 9))
    kind = draw(st.sampled_from(KINDS))
    owner = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    hosts = [tuple(rank for rank in range(ranks) if owner[rank] == host) for host in dict.fromkeys(owner)]
    topology = draw(st.sampled_from(TOPOLOGIES + (["exchange"] if kind == "all_reduce" and ranks == 2 else [])))
    root = draw(st.integers(0, ranks - 1)) if kind in ROOTED else 0
    return Shape(kind=kind, topology=topology, hosts=tuple(hosts), root=root)


def begin(shape):
    """Whose contributions each rank holds in each piece at the start; a set has no order, a list does."""
    n = shape.ranks
    held = {}
    for rank in range(n):
        for piece in range(pieces_of(shape)):
            if shape.kind == "all_to_all":
                held[rank, piece] = [(rank, piece)] if piece < n else []
            elif shape.kind in ("all_gather", "gather"):
                held[rank, piece] = [rank] if piece == rank else []
            elif shape.kind in ("broadcast", "scatter"):
                held[rank, piece] = [piece] if rank == shape.root else []
            else:
                held[rank, piece] = [rank]
    return held


def follow(shape):
    held = begin(shape)
    moves = moves_of(shape)
    for phase in sorted({move.phase for move in moves}):
        now = [move for move in moves if move.phase == phase]
        taken = [held[move.src, move.take] for move in now]
        for move, brought in zip(now, taken, strict=True):
            held[move.dst, move.put] = held[move.dst, move.put] + brought if move.add else brought
    return held


@given(shape=shapes())
@settings(max_examples=400)
def test_every_rank_ends_with_what_the_collective_promises(shape):
    held, n = follow(shape), shape.ranks
    everyone = list(range(n))
    for rank in range(n):
        match shape.kind:
            case "all_reduce":
                assert all(sorted(held[rank, piece]) == everyone for piece in range(pieces_of(shape)))
            case "reduce_scatter":
                assert sorted(held[rank, rank]) == everyone
            case "all_gather":
                assert [held[rank, piece] for piece in everyone] == [[piece] for piece in everyone]
            case "broadcast":
                assert held[rank, 0] == [0]
            case "reduce":
                assert rank != shape.root or sorted(held[rank, 0]) == everyone
            case "gather":
                assert rank != shape.root or [held[rank, p] for p in everyone] == [[p] for p in everyone]
            case "scatter":
                assert held[rank, rank] == [rank]
            case "all_to_all":
                assert [held[rank, n + src] for src in everyone if src != rank] == [
                    [(src, rank)] for src in everyone if src != rank
                ]


@given(shape=shapes().filter(lambda shape: shape.kind == "all_reduce"))
@settings(max_examples=100)
def test_all_ranks_of_an_all_reduce_add_in_the_same_order(shape):
    held = follow(shape)
    for piece in range(pieces_of(shape)):
        orders = {tuple(held[rank, piece]) for rank in range(shape.ranks)}
        assert len(orders) == 1 or shape.topology == "exchange"  # two summands commute


@given(shape=shapes())
@settings(max_examples=200)
def test_no_action_waits_for_one_that_waits_for_it(shape):
    for rank in range(shape.ranks):
        actions = program_of(shape, rank).actions
        done: set[int] = set()
        while len(done) < len(actions):
            ready = {i for i, action in enumerate(actions) if i not in done and set(action.after) <= done}
            assert ready
            done |= ready


@given(shape=shapes().filter(lambda shape: shape.kind in ("all_reduce", "reduce_scatter", "reduce")))
@settings(max_examples=100)
def test_a_piece_is_complete_once_where_it_is_rounded_and_travels_rounded_from_there(shape):
    for move, (form, completes) in zip(moves_of(shape), forms_of(shape), strict=True):
        assert move.add or form is Form.TOTAL or shape.ranks == 1
        assert not completes or move.add


def sent(shape, numel):
    bounds = cut(numel, pieces_of(shape), grain=1)
    sizes = [stop - start for start, stop in bounds]
    out = [0] * shape.ranks
    for move in moves_of(shape):
        out[move.src] += sizes[move.take]
    return out


@pytest.mark.parametrize("topology", ["direct", "ring"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_direct_and_ring_send_the_least_there_is(ranks, topology):
    hosts = (tuple(range(ranks)),)
    numel = 1000 * ranks
    for kind, factor in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        shape = Shape(kind=kind, topology=topology, hosts=hosts)
        assert sent(shape, numel) == [factor * (ranks - 1) * numel // ranks] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_tree_of_a_power_of_two_sends_the_least_in_few_phases(ranks):
    shape = Shape(kind="all_reduce", topology="tree", hosts=(tuple(range(ranks)),))
    numel = 1000 * ranks
    assert sent(shape, numel) == [2 * (ranks - 1) * numel // ranks] * ranks
    assert max(move.phase for move in moves_of(shape)) + 1 == 2 * (ranks.bit_length() - 1)


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 2, 4), (1, 3)), ((0,), (1, 2, 3)), ((0, 1), (2, 3), (4, 5))])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_hierarchical_sends_between_hosts_what_single_ranks_would(hosts, kind):
    where = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    shape = Shape(kind=kind, topology="hier", hosts=hosts)
    between = [move for move in moves_of(shape) if where[move.src] != where[move.dst]]
    single = Shape(kind=kind, topology="direct", hosts=tuple((host,) for host in range(len(hosts))))
    ranks, n = shape.ranks, len(hosts)
    if kind == "all_reduce":
        assert len(between) * n == len(moves_of(single)) * ranks  # pieces are a ranks-th here and an n-th there
    else:
        assert len(between) == sum((n - 1) * len(host) for host in hosts)
    assert {move.src for move in between} <= {host[0] for host in hosts}


@given(count=st.integers(0, 10**7), pieces=st.integers(1, 64))
def test_a_cut_is_even_and_leaves_nothing_out(count, pieces):
    bounds = cut(count, pieces)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 32


def test_the_choice_follows_size_place_and_plan():
    one, two = ((0, 1, 2, 3),), ((0, 1), (2, 3))
    assert choose_topology("all_reduce", 100, ((0, 1),)) == "exchange"
    assert choose_topology("all_reduce", 100, one) == "star"
    assert choose_topology("all_reduce", 10**8, one) == "direct"
    assert choose_topology("all_reduce", 10**8, two) == "hier"
    assert choose_topology("all_reduce", 10**8, ((0,), (1,))) == "direct"
    assert choose_topology("all_reduce", 10**8, one, "ring") == "ring"
    assert choose_topology("all_to_all", 10**8, two, "ring") == "direct"
