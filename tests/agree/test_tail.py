"""The step's tail: everybody's numbers arrive at everybody through a plain sum, to the last bit."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.agree.tail import Flag, Tail, TailShape, of_one, parts, read, write

WIRES = [torch.float32, torch.float64]


def numbers(wire):
    """What travels without loss: any double, or on a float32 wire those of a single's range with all their bits."""
    if wire != torch.float32:
        return st.floats()
    middling = st.floats(1e-20, 1e20) | st.floats(-1e20, -1e-20)
    return middling | st.sampled_from([0.0, math.inf, -math.inf, math.nan])


@st.composite
def steps(draw, wire, most_ranks=5):
    ranks, slices = draw(st.integers(1, most_ranks)), draw(st.integers(1, 9))
    parameters, extras = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rows, width = draw(st.sampled_from([(0, 0), (slices, 3)]))
    shape = TailShape(slices=slices, ranks=ranks, extras=extras, parameters=parameters, rows=rows, row_width=width)
    owner = [draw(st.integers(0, ranks - 1)) for _ in range(slices)]
    number = numbers(wire)
    losses = [(draw(number), draw(number)) for _ in range(slices)]
    singles = st.floats(width=32, allow_nan=False)
    values = torch.tensor([[draw(singles) for _ in range(width)] for _ in range(rows)]).reshape(rows, width)
    tails = [
        Tail(
            losses=[
                (i, torch.tensor(a, dtype=torch.float64), b) for i, (a, b) in enumerate(losses) if owner[i] == rank
            ],
            flags=draw(st.integers(0, 15)),
            sent_bytes=draw(st.integers(0, 2**50)),
            extras=[draw(number) for _ in range(extras)],
            present=[draw(st.booleans()) for _ in range(parameters)],
            rows=torch.stack([values[i] if owner[i] == rank else torch.zeros(width) for i in range(rows)])
            if rows
            else torch.zeros(0, width),
        )
        for rank in range(ranks)
    ]
    return shape, tails, losses, values


def summed(wire, shape, tails):
    total = torch.zeros(shape.numel(wire), dtype=wire)
    for rank, tail in enumerate(tails):
        mine = torch.full((shape.numel(wire),), 5, dtype=wire)  # what the last step left there
        write(tail, shape, rank, mine)
        total += mine
    return total


def bits(value):
    return "nan" if math.isnan(value) else struct.pack(">d", value + 0.0)  # a sum with zeros makes -0.0 to 0.0


@pytest.mark.parametrize("wire", WIRES)
@given(data=st.data())
def test_what_each_wrote_all_read(wire, data):
    shape, tails, losses, values = data.draw(steps(wire))
    agreed = read(shape, summed(wire, shape, tails))
    assert [[bits(x) for x in pair] for pair in agreed.losses] == [[bits(x) for x in pair] for pair in losses]
    assert list(agreed.flags) == [tail.flags for tail in tails]
    assert agreed.sent_bytes == sum(tail.sent_bytes for tail in tails)
    assert [[bits(x) for x in row] for row in agreed.extras] == [[bits(x) for x in tail.extras] for tail in tails]
    assert list(agreed.present) == [any(column) for column in zip(*(tail.present for tail in tails), strict=True)]
    assert torch.equal(agreed.rows.reshape(values.shape), values)


@given(data=st.data())
def test_a_worker_that_is_alone_agrees_on_what_would_have_travelled(data):
    shape, (tail,), _, values = data.draw(steps(torch.float64, most_ranks=1))
    travelled, alone = read(shape, summed(torch.float64, shape, [tail])), of_one(tail, shape)
    assert [[bits(x) for x in pair] for pair in alone.losses] == [[bits(x) for x in pair] for pair in travelled.losses]
    assert alone.flags == travelled.flags
    assert alone.sent_bytes == travelled.sent_bytes
    assert alone.extras.shape == travelled.extras.shape
    assert np.array_equal(alone.extras, travelled.extras, equal_nan=True)
    assert alone.present == travelled.present
    assert torch.equal(alone.rows, travelled.rows.reshape(values.shape))
    assert not torch.signbit(alone.rows[alone.rows == 0]).any()


@pytest.mark.parametrize("wire", WIRES)
def test_a_slice_that_nobody_computed_counts_nothing(wire):
    shape = TailShape(slices=3, ranks=2, extras=0, parameters=1, rows=0, row_width=0)
    empty = Tail(losses=[], flags=0, sent_bytes=0, extras=[], present=[False], rows=torch.zeros(0, 0))
    agreed = read(shape, summed(wire, shape, [empty, empty]))
    assert agreed.losses == ((0.0, 0.0),) * 3
    assert agreed.present == (False,)


@pytest.mark.parametrize("wire", WIRES)
def test_one_slice_s_nan_spoils_no_other_number(wire):
    shape = TailShape(slices=2, ranks=2, extras=1, parameters=1, rows=0, row_width=0)
    tails = [
        Tail(losses=[(0, math.nan, 4.0)], flags=1, sent_bytes=8, extras=[0.5], present=[True], rows=torch.zeros(0, 0)),
        Tail(losses=[(1, 0.25, 6.0)], flags=2, sent_bytes=9, extras=[0.75], present=[True], rows=torch.zeros(0, 0)),
    ]
    agreed = read(shape, summed(wire, shape, tails))
    assert math.isnan(agreed.losses[0][0])
    assert agreed.losses[1] == (0.25, 6.0)
    assert agreed.flags == (1, 2)
    assert agreed.sent_bytes == 17


def test_flags_are_apart():
    assert len({int(flag) for flag in Flag}) == len(Flag)
    assert sum(Flag) == 2 ** len(Flag) - 1


def test_a_double_takes_three_places_as_singles_and_one_otherwise():
    assert [parts(wire) for wire in WIRES] == [3, 1]
