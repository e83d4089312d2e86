"""Which samples a step consumes, how they are cut, and who computes which: for thousands of shapes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.slices import Course, assign, cut

small = st.integers(1, 60)
weights = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=9).filter(lambda w: sum(w) > 0.01)


@given(start=st.integers(0, 10**12), count=st.integers(0, 500), pieces=small)
def test_a_cut_leaves_nothing_out_and_nothing_twice(start, count, pieces):
    slices = cut(start, start + count, pieces)
    assert [piece.index for piece in slices] == list(range(pieces))
    assert slices[0].start == start
    assert slices[-1].stop == start + count
    assert all(left.stop == right.start for left, right in pairwise(slices))


@given(count=st.integers(0, 500), pieces=small)
def test_the_lengths_of_slices_differ_by_at_most_one(count, pieces):
    lengths = [len(piece) for piece in cut(0, count, pieces)]
    assert max(lengths) - min(lengths) <= 1


def test_the_edges_are_those_that_the_documentation_names():
    assert [(s.start, s.stop) for s in cut(100, 150, 7)] == [
        (100, 107), (107, 114), (114, 121), (121, 128), (128, 135), (135, 142), (142, 150),
    ]  # fmt: skip


@given(size=small, batch=small, slices=small)
def test_an_epoch_consumes_every_position_once(size, batch, slices):
    course = Course(size=size, batch=batch, slices=slices, epochs=2)
    assert course.total == 2 * course.steps_per_epoch
    for epoch in (0, 1):
        numbers = range(epoch * course.steps_per_epoch + 1, (epoch + 1) * course.steps_per_epoch + 1)
        steps = [course.step(number) for number in numbers]
        assert {step.epoch for step in steps} == {epoch}
        positions = [p for step in steps for piece in step.slices for p in range(piece.start, piece.stop)]
        assert positions == list(range(size))


@given(size=small, batch=small, slices=small, number=st.integers(1, 300))
def test_samples_before_a_step_are_those_of_the_steps_before_it(size, batch, slices, number):
    course = Course(size=size, batch=batch, slices=slices, steps=300)
    assert course.samples_before(number) == sum(course.step(n).samples for n in range(1, number))


@given(size=small, batch=small, slices=small, number=st.integers(1, 300))
def test_a_step_holds_as_many_samples_as_it_says(size, batch, slices, number):
    step = Course(size=size, batch=batch, slices=slices, steps=300).step(number)
    assert step.samples == sum(map(len, step.slices)) > 0
    assert len(step.slices) == slices


def test_a_step_far_into_a_huge_dataset_costs_no_walk_to_it():
    course = Course(size=10**12 + 1, batch=256, slices=8, steps=10**15)
    step = course.step(10**14)
    assert step.number == 10**14
    assert step.epoch == (10**14 - 1) // course.steps_per_epoch


def test_the_last_step_of_an_epoch_is_short_and_not_mixed_with_the_next():
    course = Course(size=131, batch=50, slices=7, epochs=2)
    assert [course.step(number).samples for number in range(1, 7)] == [50, 50, 31, 50, 50, 31]


@given(slices=st.integers(0, 200), weights=weights)
def test_shares_are_neighbours_and_cover_every_slice_once(slices, weights):
    shares = assign(slices, weights)
    assert len(shares) == len(weights)
    assert [index for share in shares for index in share] == list(range(slices))


@given(slices=st.integers(0, 200), weights=weights)
def test_a_share_is_within_one_slice_of_its_weight(slices, weights):
    for share, weight in zip(assign(slices, weights), weights, strict=True):
        assert abs(len(share) - slices * weight / sum(weights)) < 1 + 1e-9


@given(slices=st.integers(1, 200), workers=st.integers(1, 20))
def test_equal_workers_get_equal_shares_and_the_lower_ranks_what_is_over(slices, workers):
    lengths = [len(share) for share in assign(slices, [1.0] * workers)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_a_worker_without_weight_gets_nothing():
    assert [len(share) for share in assign(6, [1.0, 0.0, 2.0])] == [2, 0, 4]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [2.0, -1.0]])
def test_weights_that_say_nothing_are_refused(weights):
    with pytest.raises(ConfigError, match="weights"):
        assign(4, weights)


@pytest.mark.parametrize(
    ("size", "batch", "smallest"), [(100, 32, 1), (96, 32, 4), (104, 32, 1), (112, 32, 2), (5, 32, 1), (131, 50, 3)]
)
def test_the_smallest_slice_is_that_of_a_full_or_a_short_step(size, batch, smallest):
    course = Course(size=size, batch=batch, slices=8, epochs=1)
    found = [len(piece) for number in range(1, course.total + 1) for piece in course.step(number).slices if len(piece)]
    assert course.smallest_slice == smallest == min(found)
