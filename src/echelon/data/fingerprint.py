"""A hash of what samples hold: tells two workers, or two starts, whose datasets are not the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def fingerprint(value: Any) -> str:
    """SHA-256 of the values in it: tensors, arrays, numbers and text in any nesting of mappings and sequences. Of
    anything else the type alone.
    """
    code = hashlib.sha256()
    for piece in _pieces(value, 0):
        code.update(piece + b"\0")
    return code.hexdigest()


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        if plain.layout == torch.strided:
            yield f"{plain.dtype}{tuple(plain.shape)}".encode()
            yield plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype}{value.shape}".encode()
        yield repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif depth < 20 and isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _pieces(item, depth + 1)
    elif depth < 20 and isinstance(value, Sequence):
        for item in value:
            yield from _pieces(item, depth + 1)
