"""Reductions on plain memory give what torch gives, half precision rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.arithmetic import arithmetic_of
from echelon.comm.memory import Memory

TORCH = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_bfloat16_is_rounded_as_torch_does(values):
    wide = torch.tensor(values, dtype=torch.float32)
    out = np.empty(len(values), np.uint16)
    arithmetic = arithmetic_of(torch.bfloat16, "sum")
    arithmetic.narrow(wide.numpy(), out)
    expected = wide.bfloat16()
    got = torch.from_numpy(out).view(torch.bfloat16)
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(torch.from_numpy(arithmetic.widen(out)).nan_to_num(), expected.float().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8])
@pytest.mark.parametrize("reduction", TORCH)
def test_two_values_are_combined_as_torch_does(dtype, reduction):
    one, other = (torch.randint(0, 9, (100,)).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    arithmetic_of(dtype, reduction).combine(Memory(one).array, Memory(other).array, out=Memory(out).array)
    assert torch.equal(out, TORCH[reduction](one, other))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_mean_of_complex_values_is_that_of_their_parts(dtype):
    total = torch.tensor([10 - 7j, complex(float("inf"), 1), 0.1 + 0.7j], dtype=dtype)
    expected = torch.view_as_real(total) / 3
    arithmetic_of(dtype, "avg").finish(Memory(total).array, 3)
    assert torch.equal(torch.view_as_real(total), expected)


@pytest.mark.parametrize(
    ("dtype", "reduction", "why"),
    [
        (torch.float32, "band", "for integers"),
        (torch.bfloat16, "bxor", "for integers"),
        (torch.complex64, "max", "not defined"),
        (torch.bool, "avg", "not defined"),
        (torch.float8_e4m3fn, "sum", "cannot be reduced"),
    ],
)
def test_what_has_no_meaning_is_refused(dtype, reduction, why):
    with pytest.raises(ValueError, match=why):
        arithmetic_of(dtype, reduction)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(3.0),
        torch.empty(0),
        torch.randn(4).bfloat16(),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ],
)
def test_memory_goes_back_to_where_it_came_from(tensor):
    memory = Memory(tensor)
    before = tensor.clone()
    memory.array[:] = memory.array.copy()
    memory.give_back()
    assert memory.array.nbytes == tensor.nbytes
    if tensor.dtype == torch.float8_e4m3fn:
        tensor, before = tensor.float(), before.float()
    assert torch.equal(tensor, before)
