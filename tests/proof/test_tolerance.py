"""Tolerances come from the arithmetic: wide enough for any order of the same additions, far below any mistake."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.proof.sampling import last_attempt
from echelon.proof.tolerance import Rounding, gamma, merging_matters, parameter_tolerance, unit

SINGLES = st.floats(-1e6, 1e6, width=32)


@given(st.lists(SINGLES, min_size=2, max_size=40), st.randoms(use_true_random=False))
def test_two_orders_of_a_sum_lie_within_the_tolerance(numbers: list[float], chance: object) -> None:
    other = list(numbers)
    chance.shuffle(other)  # type: ignore[attr-defined]
    one, two = (np.float32(0), np.float32(0))
    for a, b in zip(numbers, other, strict=True):
        one, two = np.float32(one + np.float32(a)), np.float32(two + np.float32(b))
    rounding = Rounding(slices=len(numbers), samples=1, loose=False, bf16=False)
    mass = float(np.abs(np.float64(numbers)).sum())
    assert abs(float(one) - float(two)) <= rounding.gradient(0.0, mass, mass, torch.float32)


def test_a_mistake_of_a_thousandth_is_beyond_the_tolerance() -> None:
    merged = Rounding(slices=8, samples=512, loose=True, bf16=False)
    assert merged.gradient(0.0, 1.0, 1.0, torch.float32) < 1e-3
    alone = Rounding(slices=8, samples=512, loose=False, bf16=False)
    assert alone.gradient(0.0, 1.0, 1.0, torch.float32) < 2e-6


def test_an_update_may_differ_by_rounding_only() -> None:
    assert parameter_tolerance(1, 1.0, 1e-3, 0.0, torch.float32) < 1e-6


def test_rounding_is_counted_in_the_parameters_own_type() -> None:
    assert unit(torch.float32) == 2.0**-24
    assert unit(torch.bfloat16) == 2.0**-8
    assert unit(torch.complex128) == 2.0**-53
    assert gamma(10**9, 2.0**-24) == 1.0


def test_merging_matters_if_half_of_the_digits_change() -> None:
    assert not merging_matters(1e-6, 1.0, 1.0, unit(torch.float32))
    assert merging_matters(1e-3, 1.0, 1.0, unit(torch.float32))


def test_samples_of_a_step_computed_again_count_once() -> None:
    assert last_attempt([1, 2, 3, 1, 2, 3], 3) == [1, 2, 3]
    assert last_attempt([1, 2, 3], 3) == [1, 2, 3]
    assert last_attempt([1, 1], 2) == [1, 1]
    assert last_attempt([], 0) == []
