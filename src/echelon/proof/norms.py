"""BatchNorm's running statistics by the documented rule: where each slice leads, applied in slice order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Row = dict[str, tuple[Tensor, Tensor, int]]
"""For each layer by name: running mean, running variance, forward passes counted."""


class Norms:
    """The layers of one model that keep running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
            and type(layer).forward is _BatchNorm.forward
            and layer.running_mean is not None
            and layer.num_batches_tracked is not None
        }
        keys = ("running_mean", "running_var", "num_batches_tracked")
        self.by_batch = any(isinstance(layer, _BatchNorm) for layer in module.modules())  # tracked or not
        self.names = {f"{name}.{key}" if name else key for name in self._layers for key in keys}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def read(self) -> Row:
        return {
            name: (_mean(layer).clone(), _var(layer).clone(), int(_passes(layer)))
            for name, layer in self._layers.items()
        }

    def write(self, row: Row) -> None:
        for name, (mean, var, passes) in row.items():
            layer = self._layers[name]
            _mean(layer).copy_(mean)
            _var(layer).copy_(var)
            _passes(layer).fill_(passes)

    def apply(self, rows: Iterable[Row]) -> None:
        """Every slice started where the model is now; r <- r1 + (1 - m)^c (r - r0) for every slice in order."""
        start = self.read()
        for row in rows:
            for name, (mean, var, passes) in row.items():
                mean_0, var_0, passes_0 = start[name]
                layer, count = self._layers[name], passes - passes_0
                if count:
                    self._apply(layer, ((_mean(layer), mean_0, mean), (_var(layer), var_0, var)), passes_0, count)

    @staticmethod
    def _apply(layer: _BatchNorm, moved: Iterable[tuple[Tensor, Tensor, Tensor]], passes_0: int, count: int) -> None:
        """For a cumulative average r <- ((N r - N0 r0) + (N0 + c) r1) / (N + c)."""
        before = int(_passes(layer))
        for running, start, end in moved:
            if layer.momentum is None:
                running.copy_((running * before - start * passes_0 + end * (passes_0 + count)) / (before + count))
            else:
                running.copy_((running - start) * (1.0 - layer.momentum) ** count + end)
        _passes(layer).fill_(before + count)


def _mean(layer: _BatchNorm) -> Tensor:
    assert isinstance(layer.running_mean, torch.Tensor)
    return layer.running_mean


def _var(layer: _BatchNorm) -> Tensor:
    assert isinstance(layer.running_var, torch.Tensor)
    return layer.running_var


def _passes(layer: _BatchNorm) -> Tensor:
    assert isinstance(layer.num_batches_tracked, torch.Tensor)
    return layer.num_batches_tracked
