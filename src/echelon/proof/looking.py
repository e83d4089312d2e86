"""Looking into one slice while it is computed: its inputs, and where the first value appears that is no number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Input:
    """One tensor of the batch. Figures are of its finite values; None where it has none, or they make no sense."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    smallest: float | None
    largest: float | None
    mean: float | None
    nans: int
    infinities: int


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Where the first NaN or infinity appeared: `where` is what kind of place, `name` which, `samples` whose rows."""

    where: str
    name: str
    kind: str
    samples: tuple[int, ...]


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside a batch or an output, with the path to it."""
    if isinstance(value, Tensor):
        yield name or "batch", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{name}[{index}]")


def summarize(batch: Any) -> list[Input]:
    return [_summary(name, tensor.detach()) for name, tensor in tensors_of(batch)]


def _summary(name: str, tensor: Tensor) -> Input:
    is_number = not tensor.is_complex()
    values = tensor.double().flatten() if is_number else torch.view_as_real(tensor).double().flatten()
    finite = values[torch.isfinite(values)]
    has = bool(finite.numel())
    return Input(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        smallest=float(finite.min()) if has else None,
        largest=float(finite.max()) if has else None,
        mean=float(finite.mean()) if has else None,
        nans=int(torch.isnan(values).sum()),
        infinities=int(torch.isinf(values).sum()),
    )


def find_in(places: Iterator[tuple[str, Tensor]], where: str, ids: Sequence[int]) -> NotFinite | None:
    """The first of these tensors that is not finite."""
    return next((found for name, tensor in places if (found := _look(tensor, where, name, ids))), None)


def _look(tensor: Tensor, where: str, name: str, ids: Sequence[int]) -> NotFinite | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = tensor.detach()
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return None
    rows: tuple[int, ...] = ()
    if values.ndim and values.shape[0] == len(ids):
        lines = bad.reshape(len(ids), -1).any(dim=1).tolist()
        rows = tuple(sample for sample, is_bad in zip(ids, lines, strict=True) if is_bad)
    kind = "NaN" if bool(torch.isnan(values).any()) else "infinity"
    return NotFinite(where=where, name=name, kind=kind, samples=rows)


@dataclass(kw_only=True)
class Watcher:
    """Hooks on every module: remembers the first output, and in backward the first gradient, that is not finite."""

    ids: Sequence[int]
    forward: NotFinite | None = None
    backward: NotFinite | None = None
    _handles: list[Any] = field(default_factory=list)

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        for name, child in module.named_modules():
            self._handles.append(child.register_forward_hook(self._hook(name, child)))
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _hook(self, name: str, child: nn.Module) -> Any:
        title = f"{name or 'the model'} ({type(child).__name__})"

        def seen(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self.forward is None:
                self.forward = find_in(tensors_of(output), "the output of module", self.ids)
                if self.forward is not None:
                    self.forward = NotFinite(**{**vars(self.forward), "name": title})
            for _, tensor in tensors_of(output):
                if tensor.requires_grad:
                    self._handles.append(tensor.register_hook(lambda gradient: self._saw_gradient(title, gradient)))

        return seen

    def _saw_gradient(self, title: str, gradient: Tensor) -> None:
        if self.backward is None:
            self.backward = _look(gradient, "the gradient of the output of module", title, self.ids)
