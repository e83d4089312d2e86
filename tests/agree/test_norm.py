"""The global norm: right, and in exact mode a function of the gradients alone."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.agree.norm import BLOCK, global_norm


def some(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(BLOCK + 7, generator=generator) * 1e-3,
        "c": torch.randn((), generator=generator) * 1e3,
    }


def true_norm(gradients):
    return math.sqrt(math.fsum(float(x) ** 2 for g in gradients.values() for x in g.flatten().double().tolist()))


@pytest.mark.parametrize("exact", [True, False])
def test_it_is_the_two_norm_over_everything(exact):
    assert float(global_norm(some(), exact)) == pytest.approx(true_norm(some()), rel=1e-5)


def test_the_exact_one_is_right_to_fourteen_digits():
    assert float(global_norm(some(), True)) == pytest.approx(true_norm(some()), rel=1e-14)


def test_the_exact_one_does_not_depend_on_the_order_of_names():
    one = some()
    other = dict(reversed(one.items()))
    assert torch.equal(global_norm(one, True), global_norm(other, True))


def test_the_exact_one_does_not_depend_on_how_memory_is_laid_out():
    image = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    turned = image.contiguous(memory_format=torch.channels_last)
    assert torch.equal(global_norm({"a": image}, True), global_norm({"a": turned}, True))


def test_squares_that_overflow_a_single_do_not_overflow_it():
    assert float(global_norm({"a": torch.tensor([3e30, 4e30])}, True)) == pytest.approx(5e30, rel=1e-6)


def test_complex_numbers_count_by_magnitude():
    assert float(global_norm({"a": torch.tensor([3 + 4j])}, True)) == pytest.approx(5.0)


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_has_norm_zero(exact):
    assert float(global_norm({}, exact)) == 0.0
