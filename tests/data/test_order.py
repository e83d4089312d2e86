"""The order of samples is the documented permutation, looks like chance, and costs the same memory at any size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.data.order import LARGEST, Order
from echelon.randomness import derive, order_seed

WORD = 2**64


def scalar_id(size, seed, epoch, position):
    """The docstring's formula, a number at a time and with no numpy."""
    b = max(1, (size - 1).bit_length())
    a, c = b // 2, b - b // 2
    keys = [derive(order_seed(seed, epoch), "round", r) for r in range(16 if b <= 8 else 8)]

    def mix(x, k, w):
        z = (x + k) * 0xBF58476D1CE4E5B9 % WORD
        z ^= z >> 32
        z = z * 0x94D049BB133111EB % WORD
        return z >> (64 - w)

    p = position
    while True:
        high, low = p >> c, p & (2**c - 1)
        for r, k in enumerate(keys):
            if r % 2 == 0:
                high ^= mix(low, k, a)
            else:
                low ^= mix(high, k, c)
        p = high << c | low
        if p < size:
            return p


@given(
    st.one_of(st.integers(1, 600), st.integers(1, LARGEST)), st.integers(0, 2**63 - 1), st.integers(0, 50), st.data()
)
def test_an_id_is_what_the_documented_formula_gives(size, seed, epoch, data):
    start = data.draw(st.integers(0, size - 1))
    stop = min(size, start + 5)
    expected = [scalar_id(size, seed, epoch, position) for position in range(start, stop)]
    assert Order(size, seed).ids(epoch, start, stop).tolist() == expected


def test_an_epoch_has_every_sample_once_at_every_size_up_to_300():
    for size, epoch in itertools.product(range(1, 301), range(2)):
        assert sorted(Order(size, 5).ids(epoch, 0, size).tolist()) == list(range(size))


def test_an_epoch_of_many_blocks_has_every_sample_once():
    size = 50_001
    assert np.array_equal(np.sort(Order(size, 1).ids(0, 0, size)), np.arange(size))


@given(st.integers(1, 20_000), st.integers(0, 3), st.lists(st.integers(0, 20_000), max_size=8))
def test_the_order_does_not_depend_on_how_ranges_are_cut(size, epoch, cuts):
    whole = Order(size, 9).ids(epoch, 0, size)
    order = Order(size, 9)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    pieces = [order.ids(epoch, a, b) for a, b in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_the_order_does_not_depend_on_what_was_asked_before():
    order, size = Order(10_000, 2), 10_000
    asked = [(epoch, start) for epoch in (1, 0, 2, 1) for start in (8000, 0, 4000)]
    for epoch, start in asked:
        assert np.array_equal(order.ids(epoch, start, start + 300), Order(size, 2).ids(epoch, start, start + 300))


def test_what_a_caller_does_to_its_ids_stays_with_it():
    order = Order(100, 0)
    before = order.ids(0, 0, 10).copy()
    order.ids(0, 0, 10)[:] = -1
    assert np.array_equal(order.ids(0, 0, 10), before)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [Order(1000, seed).ids(epoch, 0, 1000) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 12  # 1 expected; more than 11 in one of 36 pairs: odds 1e-8


def chi_square(counts):
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def bound(freedom):
    """Wilson and Hilferty's upper point at 5 standard deviations: odds of 3e-7 for a fair order."""
    return freedom * (1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 13, 16, 31])
def test_every_sample_is_equally_likely_at_every_position(size):
    epochs = 1500
    order, counts = Order(size, 3), np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), order.ids(epoch, 0, size)] += 1
    assert chi_square(counts) < bound((size - 1) ** 2)


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_every_permutation_of_a_few_samples_is_about_equally_likely(size):
    order, seen = Order(size, 21), {}
    epochs = 3000
    for epoch in range(epochs):
        key = tuple(order.ids(epoch, 0, size).tolist())
        seen[key] = seen.get(key, 0) + 1
    counts = np.array([seen.get(key, 0) for key in itertools.permutations(range(size))], dtype=float)
    assert chi_square(counts) < bound(counts.size - 1)


@pytest.mark.parametrize("size", [8, 13])
def test_every_pair_of_samples_is_equally_likely_at_any_two_positions(size):
    epochs = 3000
    order = Order(size, 22)
    ids = np.array([order.ids(epoch, 0, size) for epoch in range(epochs)])
    apart = ~np.eye(size, dtype=bool).ravel()
    for other in range(1, size):
        pairs = np.bincount(ids[:, 0] * size + ids[:, other], minlength=size * size)[apart].astype(float)
        assert chi_square(pairs) < bound(pairs.size - 1)


@pytest.mark.parametrize("size", [1000, 4096, 100_003])
def test_neighbours_are_spread_like_chance(size):
    counts = np.zeros(20)
    for epoch in range(3 if size > 10_000 else 30):
        ids = Order(size, 11).ids(epoch, 0, size)
        counts += np.histogram((ids[1:] - ids[:-1]) % size, bins=20, range=(0, size))[0]
    assert chi_square(counts) < bound(19)


def test_memory_does_not_grow_with_the_dataset():
    order = Order(LARGEST, 0)
    for epoch in range(3):
        for start in (0, LARGEST // 2, LARGEST - 300):
            ids = order.ids(epoch, start, start + 300)
            assert ids.dtype == np.int64
            assert (ids >= 0).all()
            assert (ids < LARGEST).all()
    assert sum(block.size for block in order._blocks.values()) <= 3 * 4096
