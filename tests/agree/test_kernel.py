"""The compiled form of the exact sums gives the bits of the plain one, and nothing depends on its being there."""

from __future__ import annotations

import importlib.metadata
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.agree import grid, kernel, summation
from equivalence.jobs import JOBS
from lockstep import Fleet

COMPILED = kernel.load_kernel()
needs_kernel = pytest.mark.skipif(COMPILED is None, reason="it was not compiled here: there was no C compiler")
any_single = st.floats(width=32)
odd_ones = st.sampled_from([0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 2.0**23 - 0.5, -(2.0**22) - 0.5, 2.0**-149, 3e38])
rows = st.lists(st.lists(any_single | odd_ones, min_size=0, max_size=40), min_size=1, max_size=4)


def is_installed() -> bool:
    """By pip, which compiles it; not merely found on the path."""
    try:
        return bool(importlib.metadata.distribution("echelon"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_installed(), reason="Echelon is not installed, only found on the path")
def test_it_is_there_where_there_is_a_compiler():
    assert COMPILED is not None or not (shutil.which("cc") or shutil.which("gcc"))


def bits(tensor):
    return tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32).tolist()


@needs_kernel
@settings(max_examples=300)
@given(rows=rows, missing=st.integers(0, 3), k=st.integers(-100, 120), first=st.booleans())
def test_it_adds_the_same_bits_and_finds_the_same_largest(rows, missing, k, first):
    gradients = [torch.tensor(row, dtype=torch.float32) if i != missing else None for i, row in enumerate(rows)]
    sizes = [torch.empty(len(row)) for row in rows]
    flat = torch.cat([torch.zeros(s.numel()) if g is None else g for g, s in zip(gradients, sizes, strict=True)])
    start = torch.arange(flat.numel(), dtype=torch.float64) - 7
    expected, found = start.clone(), start.clone()
    largest = grid.largest_magnitude(flat)
    if math.isfinite(largest):  # what is not is told before anything is added
        grid.add_to_grid(flat.clone(), k, expected, first)
    same = COMPILED.add_to_grid(gradients, kernel.sizes_of(sizes), k, found, first)
    assert same == largest or (math.isnan(same) and math.isnan(largest))
    if math.isfinite(largest):
        assert bits(found) == bits(expected)


@needs_kernel
@given(
    total=st.lists(st.integers(-(2**53), 2**53).map(float) | st.just(-0.0), max_size=50),
    k=st.integers(-100, 120),
    weight=st.floats(1e-3, 1e6),
)
def test_it_gives_the_same_mean(total, k, weight):
    summed = torch.tensor(total, dtype=torch.float64)
    expected, found = torch.empty(len(total)), torch.empty(len(total))
    grid.from_grid(summed, k, weight, expected)
    COMPILED.from_grid(summed, k, weight, found)
    assert bits(found) == bits(expected)


@needs_kernel
def test_long_arrays_are_no_other_than_short_ones():
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(3)) * 1e-3
    expected, found = torch.zeros(values.numel(), dtype=torch.float64), torch.zeros(values.numel(), dtype=torch.float64)
    for first in (True, False):
        grid.add_to_grid(values.clone(), 43, expected, first)
        COMPILED.add_to_grid([values], kernel.sizes_of([values]), 43, found, first)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["dense", "sometimes", "images"])
def test_a_job_trains_to_the_same_bits_without_it(monkeypatch, name):
    with_it = Fleet(JOBS[name], 2).run().digest()
    monkeypatch.setattr(summation, "load_kernel", lambda: None)
    assert Fleet(JOBS[name], 2).run().digest() == with_it


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, 3).t(),
        torch.ones(2, dtype=torch.complex64),
        torch.imag(torch.ones(1, dtype=torch.complex64).conj()),
    ],
)
def test_what_it_cannot_read_is_left_to_the_plain_form(gradient):
    assert not kernel.is_plain(gradient)
    assert kernel.is_plain(torch.ones(2))


def test_a_library_that_does_not_load_is_as_good_as_none(monkeypatch, tmp_path):
    (tmp_path / "_kernel.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr(kernel, "__file__", str(tmp_path / "kernel.py"))
    assert kernel.load_kernel() is None
