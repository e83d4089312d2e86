"""Samples by the documented rule, for the reference: one by one, each under its own random state, then collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import default_collate

from echelon.proof.chance import Chance, state
from echelon.proof.rules import derive


class Samples:
    """Reads a dataset. First one sample is read for nothing, so that generators made at first use exist."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset = dataset
        self._collate: Callable[[list[Any]], Any] = collate or default_collate
        self._seed = seed
        self._own: Chance | None = None
        self._both = Chance()
        self.collate_can_draw = collate is not None and Chance(collate).can_draw
        self.state_after_seeding: tuple[object, ...] = ()

    def read(self, epoch: int, ids: Sequence[int], value: int) -> Any:
        """The batch of these samples; the random state is then what collating left of `value`."""
        if self._own is None:
            Chance().set(derive(self._seed, "calm"))
            with suppress(Exception):  # the same read follows, and reports
                self._get(ids[0])
            self._own = Chance(self._dataset)
            self._both = Chance(self._dataset, self._collate)
        samples = []
        for sample in ids:
            self._own.set(derive(self._seed, "sample", epoch, sample))
            samples.append(self._get(sample))
        self._both.set(value)
        self.state_after_seeding = state()
        return self._collate(samples)

    def _get(self, sample: int) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__([sample])[0]
        return self._dataset[sample]
