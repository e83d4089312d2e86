"""BatchNorm's running statistics by the documented rule: what each slice contributes, applied in slice order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Row = dict[str, tuple[Tensor, Tensor, int, bool]]
"""For each layer by name: running mean, running variance, forward passes counted, whether it is in training."""


class Norms:
    """The layers of one model that keep running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm | _InstanceNorm)
            and type(layer).__module__.startswith("torch.nn.")
            and layer.track_running_stats
            and layer.running_mean is not None
        }
        keys = ("running_mean", "running_var", "num_batches_tracked")
        self.names = {f"{name}.{key}" if name else key for name in self._layers for key in keys}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def read(self) -> Row:
        return {
            name: (_mean(layer).clone(), _var(layer).clone(), int(_passes(layer)), layer.training)
            for name, layer in self._layers.items()
        }

    def write(self, row: Row) -> None:
        for name, (mean, var, passes, _) in row.items():
            layer = self._layers[name]
            _mean(layer).copy_(mean)
            _var(layer).copy_(var)
            _passes(layer).fill_(passes)

    def clear(self) -> None:
        """Before a slice: its statistics start from zero. A frozen layer keeps what it normalises by."""
        for layer in self._layers.values():
            if layer.training:
                for buffer in (_mean(layer), _var(layer), _passes(layer)):
                    buffer.zero_()

    def apply(self, rows: Iterable[Row]) -> None:
        """r <- (1 - m)^c r + b for every slice in order; for a cumulative average (N r + c b) / (N + c)."""
        for row in rows:
            for name, (mean, var, passes, training) in row.items():
                if training and passes:
                    self._apply(self._layers[name], mean, var, passes)

    @staticmethod
    def _apply(layer: _BatchNorm | _InstanceNorm, mean: Tensor, var: Tensor, passes: int) -> None:
        before = int(_passes(layer))
        for running, seen in ((_mean(layer), mean), (_var(layer), var)):
            if layer.momentum is None:
                running.copy_((running * before + seen * passes) / (before + passes))
            else:
                running.copy_(running * (1.0 - layer.momentum) ** passes + seen)
        _passes(layer).fill_(before + passes)


def _mean(layer: _BatchNorm | _InstanceNorm) -> Tensor:
    assert isinstance(layer.running_mean, torch.Tensor)
    return layer.running_mean


def _var(layer: _BatchNorm | _InstanceNorm) -> Tensor:
    assert isinstance(layer.running_var, torch.Tensor)
    return layer.running_var


def _passes(layer: _BatchNorm | _InstanceNorm) -> Tensor:
    assert isinstance(layer.num_batches_tracked, torch.Tensor)
    return layer.num_batches_tracked
