"""Seconds from latency and bandwidth: lines through made-up samples, and collectives whose time can be worked out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.cost import predict
from echelon.comm.frame import FRAME_BYTES
from echelon.comm.timing import Line, Sample, fit, seconds_of

SIZES = [8, 4096, 65_536, 1 << 20, 16 << 20]


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_a_line_is_found_again(latency_s, byte_s):
    truth = Line(latency_s=latency_s, byte_s=byte_s)
    found = fit([Sample(size_bytes=size, seconds=truth.seconds(size)) for size in SIZES])
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert found.byte_s == pytest.approx(byte_s, rel=1e-6)


@given(st.integers(0, 10_000))
def test_noise_and_stalls_move_it_little(seed):
    dice, truth = random.Random(seed), Line(latency_s=40e-6, byte_s=5e-10)
    samples = []
    for size in SIZES:
        for number in range(15):
            stall = 0.02 if number % 5 == 0 else 0.0
            samples.append(Sample(size_bytes=size, seconds=truth.seconds(size) * dice.uniform(0.9, 1.15) + stall))
    found = fit(samples)
    assert found.latency_s == pytest.approx(truth.latency_s, rel=0.25)
    assert found.byte_s == pytest.approx(truth.byte_s, rel=0.25)


def test_neither_latency_nor_bandwidth_is_negative():
    falling = fit([Sample(size_bytes=8, seconds=1e-3), Sample(size_bytes=1 << 20, seconds=1e-4)])
    assert falling.latency_s > 0
    assert falling.byte_s == 0
    steep = fit([Sample(size_bytes=1000, seconds=1e-6), Sample(size_bytes=10_000, seconds=1e-3)])
    assert steep.latency_s == 0
    assert steep.byte_s > 0
    assert fit([Sample(size_bytes=8, seconds=1e-3)]) == Line(latency_s=1e-3, byte_s=0.0)


def time_of(kind: str, n: int, numel: int, topology: str, *, latency_s: float = 1e-4, byte_s: float = 1e-9) -> float:
    line = Line(latency_s=latency_s, byte_s=byte_s)
    lines = {(i, j): line for i in range(n) for j in range(n)}
    return seconds_of(predict(kind, hosts=(tuple(range(n)),), numel=numel, topology=topology), lines)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_a_ring_takes_two_n_minus_one_steps(n):
    assert time_of("all_reduce", n, n, "ring") == pytest.approx(2 * (n - 1) * 1e-4, rel=1e-3)
    size = n * (1 << 20)
    seconds = time_of("all_reduce", n, size, "ring", latency_s=0.0)
    assert seconds == pytest.approx(2 * (n - 1) / n * size * 4 * 1e-9, rel=0.01)


@pytest.mark.parametrize(("n", "steps"), [(2, 1), (4, 2), (5, 2), (8, 3), (16, 4)])
def test_a_small_broadcast_over_a_tree_takes_as_many_latencies_as_it_is_deep(n, steps):
    assert time_of("broadcast", n, 2, "tree") == pytest.approx(steps * 1e-4, rel=1e-3)


def test_a_long_chain_is_a_pipeline():
    """The last rank begins a frame a rank later, and all end soon after one message would."""
    size = 16 << 20
    alone = size * 4 * 1e-9
    seconds = time_of("broadcast", 8, size, "ring", latency_s=0.0)
    assert alone < seconds <= alone + 7 * FRAME_BYTES * 1e-9 * 1.01


def test_a_star_shares_its_root_s_bandwidth():
    size = 1 << 20
    assert time_of("broadcast", 5, size, "star", latency_s=0.0) == pytest.approx(4 * size * 4 * 1e-9)
    assert time_of("gather", 5, size, "star", latency_s=0.0) == pytest.approx(4 * size * 4 * 1e-9)


def test_direct_waits_least_and_a_ring_most_where_latency_is_all():
    by_topology = {name: time_of("all_reduce", 8, 64, name) for name in ("direct", "ring", "tree", "star")}
    assert by_topology["direct"] == pytest.approx(2e-4, rel=1e-2)
    assert by_topology["star"] == pytest.approx(2e-4, rel=2e-2)
    assert by_topology["tree"] == pytest.approx(6e-4, rel=1e-2)
    assert max(by_topology, key=by_topology.__getitem__) == "ring"


@given(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]), st.integers(2, 12), st.integers(0, 1 << 20))
def test_more_bytes_never_take_less_and_a_slow_link_slows(kind, n, numel):
    for topology in ("direct", "ring", "tree", "star"):
        seconds = time_of(kind, n, numel, topology)
        assert time_of(kind, n, 2 * numel + 1, topology) >= seconds
        assert time_of(kind, n, numel, topology, byte_s=2e-9) >= seconds


def test_one_slow_link_slows_a_ring_and_not_a_tree_that_does_not_use_it():
    fast, slow = Line(latency_s=1e-5, byte_s=1e-10), Line(latency_s=1e-3, byte_s=1e-8)
    lines = {(i, j): slow if {i, j} == {1, 2} else fast for i in range(4) for j in range(4)}
    ring, tree = (
        seconds_of(predict("all_reduce", hosts=((0, 1, 2, 3),), numel=1 << 20, topology=name), lines)
        for name in ("ring", "tree")
    )
    assert ring > 6 * (1 << 20) * slow.byte_s
    assert tree < 6 * fast.seconds(1 << 20)
