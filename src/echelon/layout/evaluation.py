"""Measuring the model: chunks of the evaluation data shared out over the workers, weighted by what was really
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from echelon.comm import Group
from echelon.errors import UserError, users_code
from echelon.layout.guard import buffers_kept
from echelon.layout.whole import Batches, to_device
from echelon.randomness import Generators, derive

Sums = dict[str, tuple[float, float]]


class Evaluation:
    """Runs `metric` over the whole of the data. Chunks are added in their order, and none changes the model for the
    next, so the figure is the same on any workers.
    """

    def __init__(
        self,
        module: nn.Module,
        metric: Callable[[nn.Module, Any], Mapping[str, tuple[Any, Any]]],
        batches: Batches,
        group: Group,
        *,
        size: int,
        batch: int,
        seed: int,
        bf16: bool,
    ) -> None:
        self._module = module
        self._metric = metric
        self._batches = batches
        self._group = group
        self._size = size
        self._batch = batch
        self._seed = seed
        self._bf16 = bf16
        self._generators = Generators.of(module, metric)

    def run(self) -> dict[str, float]:
        """Every metric's total sum over its total weight."""
        was_training = [m for m in self._module.modules() if m.training]
        self._module.eval()
        try:
            with torch.no_grad(), users_code("evaluating", self._group.rank):
                mine = {}
                for chunk in range(self._group.rank, self._chunks, self._group.size):
                    with buffers_kept(self._module):
                        mine[chunk] = self._measure(chunk)
        finally:
            for module in was_training:
                module.training = True
        everybody = self._group.gather({str(chunk): sums for chunk, sums in mine.items()}, "sharing evaluation sums")
        by_chunk = {int(chunk): sums for part in everybody for chunk, sums in part.items()}
        return average([by_chunk[chunk] for chunk in range(self._chunks)])

    @property
    def _chunks(self) -> int:
        return -(-self._size // self._batch)

    def _measure(self, chunk: int) -> Sums:
        start = chunk * self._batch
        seed = derive(self._seed, "evaluate", chunk)
        batch = self._batches.read(0, start, min(start + self._batch, self._size), seed)
        if self._generators.held:
            self._generators.set_held(seed)
        device = self._group.device
        with torch.autocast(device.type, torch.bfloat16) if self._bf16 else nullcontext():
            values = self._metric(self._module, to_device(batch, device))
        try:
            return {str(name): (float(total), float(weight)) for name, (total, weight) in values.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                self._group.rank, f"metric must return {{name: (sum, weight)}}; it returned {values!r:.200}"
            ) from error


def average(chunks: list[Sums]) -> dict[str, float]:
    """Totals over all chunks, in order; a metric that counted nothing is NaN."""
    totals: Sums = {}
    for sums in chunks:
        for name, (total, weight) in sums.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + total, before[1] + weight)
    return {name: total / weight if weight else float("nan") for name, (total, weight) in totals.items()}
