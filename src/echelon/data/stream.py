"""A dataset read by position: in the epoch's order for training, in its own order for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from echelon.data.order import Order
from echelon.data.reader import Reader

Seen = Callable[[np.ndarray], None]


class Shuffled:
    """Positions of an epoch, in that epoch's order. `seen` is told the ids of all samples that are read."""

    def __init__(self, reader: Reader, order: Order, seen: Seen | None = None) -> None:
        self._reader = reader
        self._order = order
        self._seen = seen

    def read(self, epoch: int, start: int, stop: int, seed: int) -> Any:
        ids = self._order.ids(epoch, start, stop)
        if self._seen is not None:
            self._seen(ids)
        return self._reader.read(epoch, ids, seed)


class Straight:
    """Positions are sample ids."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, epoch: int, start: int, stop: int, seed: int) -> Any:
        return self._reader.read(epoch, np.arange(start, stop), seed)
