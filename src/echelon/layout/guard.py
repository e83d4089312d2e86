"""State that forward changes, other than BatchNorm's statistics: its value would depend on who computed what.

Torch counts the writes to a tensor, which is cheap to look at after every slice, and does not count all of them: not
those through `.data`, nor those of some native operations. So the first few slices are looked at bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError

CLOSELY = 3
"""So many slices are looked at bit by bit. A cache may change in some of them; what changes in each is no cache."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor of the model hangs. `lasting`: it belongs to the model's state, and is no cache."""

    name: str
    owner: nn.Module
    key: str
    is_parameter: bool
    lasting: bool

    def get(self) -> Tensor | None:
        tensors = self.owner._parameters if self.is_parameter else self.owner._buffers
        return tensors.get(self.key)


Mark = tuple[Tensor | None, int]


class Guard:
    """`open` before a slice's forward, `close` after it. Exact: what changes is refused; else it is noted down."""

    def __init__(self, module: nn.Module, known: frozenset[str], exact: bool) -> None:
        self._places = [place for place in places(module) if place.name not in known]
        self._lasting = [place for place in self._places if place.lasting]
        self._exact = exact
        self._closely = CLOSELY
        self._restless = {place.name for place in self._places if not place.lasting}
        self._marks: list[Mark] = []
        self._bits: list[int | None] = []
        self.buffers: set[str] = set()
        self.parameters: set[str] = set()

    def open(self) -> None:
        self._marks = [_mark(place) for place in self._lasting]
        if self._closely:
            self._bits = bits([place.get() for place in self._places])

    def close(self) -> None:
        for place, before in zip(self._lasting, self._marks, strict=True):
            after = _mark(place)
            if before[0] is not after[0] or before[1] != after[1]:
                self._found(place)
        if self._closely:
            self._look_closely()

    def _look_closely(self) -> None:
        self._closely -= 1
        after = bits([place.get() for place in self._places])
        moved = {place.name for place, one, two in zip(self._places, self._bits, after, strict=True) if one != two}
        self._restless &= moved
        for place in self._places:
            if place.name in moved and (place.lasting or (place.name in self._restless and not self._closely)):
                self._found(place)

    def _found(self, place: Place) -> None:
        what = "parameter" if place.is_parameter else "buffer"
        if self._exact:
            raise ConfigError(
                "exact",
                f"forward changes the {what} {place.name} of {type(place.owner).__name__}, which happens once a slice, "
                "on whichever worker computes that; only BatchNorm's running statistics can be applied in slice order. "
                "Change it in the optimizer's step, or train without --exact",
            )
        (self.parameters if place.is_parameter else self.buffers).add(place.name)


def places(module: nn.Module) -> Iterator[Place]:
    """Every parameter and buffer of the model."""
    lasting = set(module.state_dict(keep_vars=True))
    for prefix, owner in module.named_modules():
        for key in (*owner._parameters, *owner._buffers):
            name = f"{prefix}.{key}" if prefix else key
            is_parameter = key in owner._parameters
            yield Place(
                name=name, owner=owner, key=key, is_parameter=is_parameter, lasting=is_parameter or name in lasting
            )


def _mark(place: Place) -> Mark:
    """The tensor itself (its address alone may soon be another's) and how often it was written to."""
    tensor = place.get()
    return tensor, 0 if tensor is None else tensor._version


def bits(tensors: list[Tensor | None]) -> list[int | None]:
    """A number for each tensor that another value has hardly ever: the sum of its bits, taken as integers."""
    sums = [None if tensor is None else _sum(tensor) for tensor in tensors]
    found = [total for total in sums if total is not None]
    numbers = iter(torch.stack([total.to(found[0].device) for total in found]).tolist() if found else [])
    return [None if total is None else next(numbers) for total in sums]


def _sum(tensor: Tensor) -> Tensor:
    if tensor.is_meta or tensor.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    width = next(kind for kind in (torch.int32, torch.int16, torch.uint8) if tensor.element_size() % kind.itemsize == 0)
    return flat.view(width).sum(dtype=torch.int64)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Whatever happens to the model's buffers inside is undone at the end."""
    before = [(place, place.get()) for place in places(module) if not place.is_parameter]
    copies = [None if buffer is None else buffer.clone() for _, buffer in before]
    try:
        yield
    finally:
        for (place, buffer), copy in zip(before, copies, strict=True):
            place.owner._buffers[place.key] = buffer
            if buffer is not None and copy is not None:
                buffer.copy_(copy)
