"""Adding up, and the other reductions, on plain memory.

NumPy does the work: one thread, whoever calls, and no pool to start in a thread of ours. Types that NumPy does not
know travel as the integers of their width. Half precision is widened to float32, added there and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Array = npt.NDArray[Any]

_NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.bool: np.bool_,
}
DTYPES = tuple(_NUMPY)
_BITWISE = ("band", "bor", "bxor")
REDUCTIONS = ("sum", "avg", "product", "min", "max", *_BITWISE)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The type a tensor's memory is seen as; what cannot be added up is bytes."""
    found: np.dtype[Any] = np.dtype(_NUMPY.get(dtype, np.uint8))
    return found


def reduction_name(op: Any) -> str:
    """`dist.ReduceOp.SUM` (or the old enum's, or an instance of it) as a word."""
    for name in REDUCTIONS:
        if op == getattr(dist.ReduceOp, name.upper(), None):
            return name
    raise ValueError(f"the reduction {op} is not offered here; there are {', '.join(REDUCTIONS)}")


@dataclass(frozen=True)
class Arithmetic:
    """How values of one type are reduced. `wide` is the type of partial sums, where it is another one."""

    combine: Callable[..., Any]
    plain: np.dtype[Any]
    wide: np.dtype[Any] | None
    widen: Callable[[Array], Array]
    narrow: Callable[[Array, Array], None]
    mean: bool

    def finish(self, total: Array, ranks: int) -> None:
        """Turn a sum over all ranks into what was asked for."""
        if self.mean:
            if total.dtype.kind in "iu":
                np.floor_divide(total, ranks, out=total)
            else:
                # Complex values part by part: NumPy would multiply by a reciprocal, and make NaN of what is infinite.
                parts = total.view(total.real.dtype)
                np.divide(parts, ranks, out=parts)


def arithmetic_of(dtype: torch.dtype, reduction: str) -> Arithmetic:
    """The arithmetic of a type and a reduction; a ValueError where there is none."""
    if dtype not in _NUMPY:
        raise ValueError(f"{dtype} cannot be reduced here; convert it to one of {', '.join(map(str, DTYPES))}")
    kind = numpy_dtype(dtype).kind
    if reduction in _BITWISE and (kind not in "iub" or dtype == torch.bfloat16):
        raise ValueError(f"{reduction} is for integers and bool, not for {dtype}")
    if (reduction in ("min", "max") and kind == "c") or (reduction == "avg" and kind == "b"):
        raise ValueError(f"{reduction} is not defined for {dtype}")
    wide = np.dtype(np.float32) if dtype in (torch.float16, torch.bfloat16) else None
    if dtype == torch.bfloat16:
        widen, narrow = _widen_bfloat16, _narrow_bfloat16
    else:
        widen, narrow = _widen_float16, _narrow_float16
    return Arithmetic(
        combine=_ufunc(kind, reduction), plain=numpy_dtype(dtype), wide=wide, widen=widen, narrow=narrow,
        mean=reduction == "avg",
    )  # fmt: skip


def _ufunc(kind: str, reduction: str) -> Callable[..., Any]:
    if kind == "b":
        return {"sum": np.logical_or, "max": np.logical_or, "bor": np.logical_or,
                "bxor": np.logical_xor}.get(reduction, np.logical_and)  # fmt: skip
    return {
        "sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }[reduction]  # fmt: skip


def _widen_float16(half: Array) -> Array:
    return half.astype(np.float32)


def _narrow_float16(wide: Array, out: Array) -> None:
    np.copyto(out, wide, casting="same_kind")


def _widen_bfloat16(half: Array) -> Array:
    bits = half.astype(np.uint32)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)


def _narrow_bfloat16(wide: Array, out: Array) -> None:
    """Round to the nearest, ties to even; a NaN stays one."""
    bits = wide.view(np.uint32)
    odd = np.bitwise_and(np.right_shift(bits, 16), 1)
    rounded = np.right_shift(bits + (odd + np.uint32(0x7FFF)), 16)
    np.copyto(out, rounded, casting="unsafe")
    nan = np.isnan(wide)
    if nan.any():
        out[nan] = 0x7FC0
