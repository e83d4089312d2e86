"""The rules as the reference knows them and as the machinery does: two writings that must say the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon import randomness, slices
from echelon.agree.buckets import plan_buckets
from echelon.agree.norm import global_norm
from echelon.data.order import Order
from echelon.proof import rules, sums
from echelon.proof.chance import Chance, state

PATHS = st.lists(st.one_of(st.integers(-(2**63), 2**63), st.text(max_size=5)), max_size=4)


@given(seed=st.integers(0, 2**63 - 1), path=PATHS)
def test_seeds_are_the_same(seed: int, path: list[int | str]) -> None:
    assert rules.derive(seed, *path) == randomness.derive(seed, *path)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 257, 4097])
def test_the_order_is_the_same(size: int) -> None:
    positions = sorted(random.Random(size).sample(range(size), min(size, 60)))
    order = Order(size, seed=11)
    for epoch in (0, 3):
        expected = order.ids(epoch, 0, size)
        assert [rules.sample_at(p, epoch, size, 11) for p in positions] == [int(expected[p]) for p in positions]


@settings(max_examples=60)
@given(size=st.integers(1, 60), batch=st.integers(1, 20), pieces=st.integers(1, 9), number=st.integers(1, 12))
def test_a_step_is_cut_in_the_same_way(size: int, batch: int, pieces: int, number: int) -> None:
    mine = rules.lesson(number, size=size, batch=batch, slices=pieces, seed=5)
    step = slices.Course(size=size, batch=batch, slices=pieces, steps=12).step(number)
    order = Order(size, 5)
    assert [list(piece.ids) for piece in mine.pieces] == [
        order.ids(step.epoch, piece.start, piece.stop).tolist() for piece in step.slices
    ]
    assert mine.samples == step.samples


def test_steps_to_prove_include_an_epochs_end_that_is_near_and_never_more_than_there_are() -> None:
    assert rules.steps_to_prove(per_epoch=100, total=1000) == 4
    assert rules.steps_to_prove(per_epoch=7, total=1000) == 8
    assert rules.steps_to_prove(per_epoch=1, total=1000) == 4
    assert rules.steps_to_prove(per_epoch=7, total=3) == 3


def test_neighbours_are_merged_up_to_the_limit() -> None:
    pieces = tuple(rules.Piece(index=i, ids=tuple(range(i, i + n))) for i, n in enumerate((2, 2, 0, 1, 3)))
    assert [(p.index, len(p.ids)) for p in rules.merge(pieces, None)] == [(0, 8)]
    assert [(p.index, len(p.ids)) for p in rules.merge(pieces, 4)] == [(0, 4), (3, 4)]


@given(st.lists(st.tuples(st.integers(1, 4_000_000), st.booleans()), min_size=1, max_size=8))
@settings(max_examples=40)
def test_buckets_hold_the_same_names(shapes: list[tuple[int, bool]]) -> None:
    parameters = {
        f"p{i}": torch.empty(n, dtype=torch.float64 if wide else torch.float32, device="meta")
        for i, (n, wide) in enumerate(shapes)
    }
    assert sums.buckets(parameters) == [list(plan.names) for plan in plan_buckets(parameters)]


def test_the_exact_norm_is_the_same() -> None:
    gradients = {"b": torch.randn(70_000), "a": torch.randn(3, 5), "c": torch.randn(4, dtype=torch.complex64)}
    assert torch.equal(sums.exact_norm(gradients), global_norm(gradients, exact=True))


def test_an_exact_mean_does_not_depend_on_the_order_of_slices() -> None:
    parts = [{"p": torch.randn(50) * 10.0**scale} for scale in (-3, 0, 2)]
    parameters = {"p": torch.empty(50)}
    one = sums.ExactSum(parameters, 3).mean(parts, 7.0)
    other = sums.ExactSum(parameters, 3).mean(parts[::-1], 7.0)
    assert torch.equal(one["p"], other["p"])
    plain = sum(part["p"].double() for part in parts) / 7.0
    assert torch.allclose(one["p"].double(), plain, rtol=1e-6, atol=1e-9)


GENERATORS = [
    lambda: random.Random(1),
    lambda: np.random.default_rng(1),
    lambda: np.random.RandomState(1),
    lambda: np.random.RandomState(np.random.Philox(1)),
    lambda: np.random.Generator(np.random.SFC64(1)),
    torch.Generator,
]


class Holder:
    def __init__(self, generator: object) -> None:
        self.generator = generator


def _draw(generator: object) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    if isinstance(generator, np.random.RandomState):
        return float(generator.standard_normal())
    return float(generator.random())  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", GENERATORS)
def test_held_generators_are_put_into_the_same_state(make: object) -> None:
    one, other = Holder(make()), Holder(make())  # type: ignore[operator]
    Chance(one).set(2**63 + 5)
    mine = state()
    randomness.Generators.of(other).set(2**63 + 5)
    assert mine == state()
    assert [_draw(one.generator) for _ in range(3)] == [_draw(other.generator) for _ in range(3)]
