"""One number for a model: two runs that trained the same weights print the same digest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from echelon.checkpoint.tensors import find_ties, pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors by sorted name, each as

        name in UTF-8, NUL, dtype ("torch.float32"), NUL, shape ("(2, 3)"), NUL, row-major little-endian bytes

    A tied tensor counts once, under the first of its names. Device and strides make no difference.
    """
    ties = find_ties(tensors)
    total = hashlib.sha256()
    for name in sorted(tensors):
        if name in ties:
            continue
        tensor = tensors[name]
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        for piece in pieces(tensor):
            total.update(piece)
    return total.hexdigest()
