"""Tensors as flat arrays of plain memory, which is what frames are cut from and added into."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from echelon.comm.arithmetic import Array, numpy_dtype


class _Values:
    """What NumPy asks of memory that it sees as an array. `Tensor.numpy()` would forbid for good that the tensor is
    resized, which FSDP does to what it has gathered.
    """

    def __init__(self, plain: Tensor) -> None:
        dtype = numpy_dtype(plain.dtype)
        address = plain.data_ptr()
        if not address:
            raise ValueError(f"a {type(plain).__name__} has no memory of its own that could be sent")
        self._plain = plain  # lives as long as the array
        self.__array_interface__ = {
            "version": 3,
            "shape": (plain.nbytes // dtype.itemsize,),
            "typestr": dtype.str,
            "data": (address, False),
        }


class Memory:
    """A tensor's values as one flat array. What is not contiguous, or not in the host's memory, is copied, and back
    when the result is there. `filled`: its values matter; if not, it is a place for those to come.
    """

    def __init__(self, tensor: Tensor, *, filled: bool = True) -> None:
        self.tensor = tensor
        plain = tensor.detach()
        if plain.device.type != "cpu":
            plain = _on_the_host(plain, filled=filled)
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        if not plain.is_contiguous():
            plain = plain.contiguous()
        self._plain = plain
        self.array: Array = np.asarray(_Values(plain)) if plain.numel() else np.empty(0, numpy_dtype(plain.dtype))

    def give_back(self) -> None:
        """Put the result where it belongs, if it is not there yet."""
        if self._plain.data_ptr() != self.tensor.data_ptr():
            with torch.no_grad():
                self.tensor.copy_(self._plain)
            if self.tensor.is_cuda:  # whoever waits may read it on any stream
                torch.cuda.current_stream(self.tensor.device).synchronize()

    def shares(self, ranks: int) -> list[Array]:
        """As many equal pieces as there are ranks."""
        n = self.array.size // ranks
        return [self.array[rank * n : (rank + 1) * n] for rank in range(ranks)]

    def rows(self, splits: Sequence[int], ranks: int) -> list[Array]:
        """Cut along the first dimension: into equal parts, or into so many rows for each rank."""
        length = self.tensor.shape[0] if self.tensor.dim() else 1
        if not splits:
            if length % ranks:
                raise ValueError(f"the first dimension, {length}, is not divisible by the {ranks} ranks of the group")
            splits = [length // ranks] * ranks
        elif len(splits) != ranks or sum(splits) != length:
            raise ValueError(f"the sizes {list(splits)} do not cut {length} rows among {ranks} ranks")
        width = self.array.size // length if length else 0
        return [self.array[start * width : stop * width] for start, stop in pairwise(accumulate([0, *splits]))]


def _on_the_host(tensor: Tensor, *, filled: bool) -> Tensor:
    """A copy in memory that a GPU reaches directly, made when all that was queued before on the device is done."""
    if not tensor.is_cuda:
        raise ValueError(f"a tensor on {tensor.device} cannot be sent; move it to the CPU or to a CUDA device")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if filled:
        host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def is_same(one: Array, other: Array) -> bool:
    """Whether both are the same memory."""
    return not one.size or one.ctypes.data == other.ctypes.data
