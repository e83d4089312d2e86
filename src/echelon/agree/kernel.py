"""The compiled form of grid.py (kernel.c), where it could be compiled: the same bits in one pass over memory.

It is made when Echelon is installed and a C compiler is there, and never needed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Kernel:
    """Functions of a loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, single = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._add: Any = library.echelon_add_to_grid
        self._add.restype = ctypes.c_uint32
        self._add.argtypes = [long, pointer, pointer, pointer, single, ctypes.c_int]
        self._mean: Any = library.echelon_from_grid
        self._mean.restype = None
        self._mean.argtypes = [pointer, pointer, long, single, single]

    def add_to_grid(self, gradients: Sequence[Tensor | None], sizes: Any, k: int, total: Tensor, first: bool) -> float:
        """Add gradients that are `plain` to an integer total; the largest magnitude among them, NaN if there is one.
        `sizes` is theirs as `sizes_of` gives it.
        """
        arrays = (ctypes.c_void_p * len(gradients))(*[None if g is None else g.data_ptr() for g in gradients])
        bits = self._add(len(gradients), arrays, sizes, total.data_ptr(), 2.0**k, first)
        largest: float = struct.unpack("f", struct.pack("I", bits))[0]
        return largest

    def from_grid(self, total: Tensor, k: int, weight: float, into: Tensor) -> None:
        """What `grid.from_grid` does, for a plain `into`."""
        self._mean(total.data_ptr(), into.data_ptr(), into.numel(), 2.0**-k, weight)


def sizes_of(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_int64 * len(tensors))(*[tensor.numel() for tensor in tensors])


def is_plain(tensor: Tensor) -> bool:
    """Whether the kernel can read it: it looks at the memory, where a negative view has other signs than it shows."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def load_kernel() -> Kernel | None:
    """None where it was not compiled."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernel{suffix}")
        if path.exists():
            try:
                return Kernel(ctypes.CDLL(str(path)))
            except (OSError, AttributeError):  # made for another machine, or another version of this file
                return None
    return None
