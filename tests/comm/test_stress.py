"""Random operations of every kind, type, size and topology on real processes: each gives exactly what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comm.operations import FLOATING, KINDS, REDUCING, TOPOLOGIES, draw_operations
from comm.ranks import check, run_ranks
from comm.runner import run_operations

PLACES = {
    "2 ranks of a host": (2, 2),
    "4 ranks of a host": (4, 4),
    "2 ranks over TCP": (2, 1),
    "3 ranks on 2 hosts": (3, 2),
    "4 ranks on 2 hosts": (4, 2),
    "4 ranks over TCP": (4, 1),
}
"""Ranks, and how many of them share a host."""


def stress(folder: Path, ranks: int, seed: int, count: int, largest_bytes: int, limit_s: float = 60) -> list[Any]:
    groups, operations = draw_operations(seed, ranks, count, largest_bytes)

    def work(_rank: int) -> int:
        return run_operations(groups, operations, seed)

    return check(run_ranks(folder, ranks, work, timeout_s=limit_s / 2, limit_s=limit_s))


@pytest.mark.parametrize("place", PLACES)
def test_random_operations_give_exactly_what_they_should(tmp_path, spread, place):
    ranks, on_each = PLACES[place]
    spread(on_each)
    assert sum(stress(tmp_path, ranks, 1, 300, 8 << 20)) >= 300


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("place", PLACES)
def test_thousands_of_random_operations_give_exactly_what_they_should(tmp_path, spread, place, seed):
    ranks, on_each = PLACES[place]
    spread(on_each)
    assert sum(stress(tmp_path, ranks, seed, 500, 64 << 20, limit_s=600)) >= 500


def test_the_operations_that_are_drawn_are_of_every_kind_and_topology():
    groups, operations = draw_operations(1, 4, 6000, 64 << 20)
    assert {op.kind for op in operations} == set(KINDS)
    assert {one.topology for one in groups} == set(TOPOLOGIES)
    for topology in TOPOLOGIES:
        drawn = {(op.kind, op.dtype) for op in operations if groups[op.group].topology == topology}
        assert {kind for kind, dtype in drawn if dtype in FLOATING} >= set(REDUCING)
    assert max(op.numel * op.dtype.itemsize for op in operations if op.kind == "broadcast") == 64 << 20
    assert draw_operations(1, 4, 50, 1000) == draw_operations(1, 4, 50, 1000)
