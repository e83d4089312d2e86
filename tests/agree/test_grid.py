"""Exact sums against Python's integers and fractions: any values, any order, any way of sharing them out."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from echelon.agree import grid

SMALLEST = 2.0**-149  # float32's smallest number above 0
BIGGEST = float(torch.finfo(torch.float32).max)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
doubles = st.floats(-1e30, 1e30, allow_nan=False)
slice_counts = st.integers(1, grid.MOST_SLICES)


def rounded(value: float, k: int) -> int:
    """Python's own round-half-even of the exact product."""
    return round(Fraction(value) * Fraction(2) ** k)


def sum_on_grid(rows: list[list[float]], k: int, dtype: torch.dtype) -> torch.Tensor:
    total = torch.full((len(rows[0]),), 77, dtype=torch.float64)
    for index, row in enumerate(rows):
        grid.add_to_grid(torch.tensor(row, dtype=dtype), k, total, index == 0)
    return total


def rows_of(values, least=1, most=6):
    return st.integers(1, 5).flatmap(
        lambda width: st.lists(st.lists(values, min_size=width, max_size=width), min_size=least, max_size=most)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
def test_a_sum_is_the_sum_of_python_s_integers(dtype, data):
    rows = data.draw(rows_of(singles if dtype == torch.float32 else doubles))
    largest = max(abs(value) for row in rows for value in row)
    k = grid.next_k(grid.FIRST_K, largest)
    assert sum_on_grid(rows, k, dtype).tolist() == [
        sum(rounded(value, k) for value in column) for column in zip(*rows, strict=True)
    ]


@given(rows=rows_of(singles, least=2), data=st.data())
def test_neither_order_nor_sharing_out_changes_a_bit(rows, data):
    k = grid.next_k(grid.FIRST_K, max(abs(value) for row in rows for value in row))
    whole = sum_on_grid(rows, k, torch.float32)
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(1, len(rows) - 1))
    parts = sum_on_grid(shuffled[:cut], k, torch.float32) + sum_on_grid(shuffled[cut:], k, torch.float32)
    assert torch.equal(whole, parts)


def test_blocks_leave_no_seam():
    size = 2 * grid.BLOCK + 3
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(size, dtype=torch.float64)
    grid.add_to_grid(values.clone(), 40, total, True)
    grid.add_to_grid(values.clone(), 40, total, False)
    assert torch.equal(total, 2 * (values.double() * 2.0**40).round())
    mean = torch.empty(size)
    grid.from_grid(total, 40, 2.0, mean)
    assert torch.allclose(mean, values, rtol=0, atol=2.0**-40)


@given(rows=rows_of(singles), weight=st.floats(1e-3, 1e6))
def test_the_mean_is_right_within_the_grid_and_three_roundings(rows, weight):
    largest = max(abs(value) for row in rows for value in row)
    assume(largest == 0 or 1e-25 < largest < 1e30)  # so that the mean itself is neither infinite nor denormal
    k = grid.next_k(grid.FIRST_K, largest)
    mean = torch.empty(len(rows[0]))
    grid.from_grid(sum_on_grid(rows, k, torch.float32), k, weight, mean)
    for column, found in zip(zip(*rows, strict=True), mean.tolist(), strict=True):
        true = sum(map(Fraction, column)) / Fraction(weight)
        allowed = len(rows) * Fraction(2) ** -k / Fraction(weight) + 4 * abs(true) * Fraction(2) ** -24
        assert abs(Fraction(found) - true) <= allowed


@given(largest=st.floats(SMALLEST, BIGGEST), slices=slice_counts, before=st.integers(*grid.K_RANGE))
@example(largest=BIGGEST, slices=grid.MOST_SLICES, before=40)
@example(largest=SMALLEST, slices=1, before=40)
def test_one_redo_is_enough_for_any_single(largest, slices, before):
    assert grid.fits(grid.next_k(before, largest), largest, slices)


@given(largest=st.floats(SMALLEST, BIGGEST), slices=slice_counts, k=st.integers(*grid.K_RANGE))
def test_what_fits_cannot_overflow_even_if_every_slice_is_as_large(largest, slices, k):
    if grid.fits(k, largest, slices):
        assert slices * rounded(largest, k) <= 2**53


@given(largest=st.floats(SMALLEST, BIGGEST), slices=slice_counts, k=st.integers(*grid.K_RANGE))
def test_what_fits_keeps_at_least_27_bits_of_the_largest(largest, slices, k):
    if grid.fits(k, largest, slices) and k != grid.K_RANGE[1]:
        assert rounded(largest, k) >= 2 ** (grid.COARSEST_BITS - 1)


def test_zeros_fit_any_grid_and_leave_it_as_it_is():
    assert all(grid.fits(k, 0.0, 8) for k in range(-100, 121))
    assert grid.next_k(17, 0.0) == 17


def test_a_sudden_growth_by_a_thousand_needs_no_redo():
    k = grid.next_k(40, 1.0)
    assert grid.fits(k, 1000.0, 8)
    assert not grid.fits(k, 1e6, 8)


def test_a_gradient_a_million_times_smaller_is_computed_again_on_a_finer_grid():
    k = grid.next_k(40, 1.0)
    assert not grid.fits(k, 1e-6, 8)


@pytest.mark.parametrize("value", [1e-45, -1e-45, 1.17e-38, 3.4e38, -3.4e38, 0.0, -0.0])
def test_the_ends_of_the_range_are_summed_like_everything_else(value):
    single = torch.tensor(value).item()
    k = grid.next_k(grid.FIRST_K, abs(single))
    assert sum_on_grid([[value], [value]], k, torch.float32).tolist() == [2 * rounded(single, k)]


@pytest.mark.parametrize("largest", [1e60, 1e300, float("inf"), float("nan")])
def test_what_no_grid_holds_is_known_so_that_nobody_looks_for_one_forever(largest):
    assert not grid.has_grid(largest, 8)


@given(largest=st.floats(0, BIGGEST), slices=slice_counts)
def test_every_single_has_a_grid(largest, slices):
    assert grid.has_grid(largest, slices)


@given(values=st.lists(singles, min_size=1, max_size=20))
def test_the_largest_magnitude_is_the_largest_of_the_absolute_values(values):
    assert grid.largest_magnitude(torch.tensor(values)) == max(map(abs, values))


@pytest.mark.parametrize("place", range(3))
def test_one_nan_anywhere_makes_the_largest_magnitude_nan(place):
    values = [1.0, -2.0, math.inf]
    values[place] = math.nan
    assert math.isnan(grid.largest_magnitude(torch.tensor(values)))


def test_nothing_has_no_magnitude_and_infinity_an_infinite_one():
    assert grid.largest_magnitude(torch.tensor([])) == 0.0
    assert grid.largest_magnitude(torch.tensor([1.0, -math.inf])) == math.inf
