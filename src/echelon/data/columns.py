"""Tables of equally long tensors: a dataset of named columns, and micro-batches taken from such tables at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from echelon.errors import ConfigError

Ids: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = Callable[[Ids], Any]


class Columns(Dataset[dict[str, Tensor]]):
    """A map-style dataset of named, equally long tensors or arrays; item i is a dict of their rows i.

    `Columns(x=images, y=labels)[3]` is `{"x": images[3], "y": labels[3]}`. Arrays are shared, not copied.
    """

    def __init__(self, /, **columns: Tensor | NDArray[Any]) -> None:
        if not columns:
            raise ConfigError("data", "Columns needs at least one column, as in Columns(x=images, y=labels)")
        self.columns = {name: _as_tensor(name, column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError("data", f"columns must be equally long, and these are not: {lengths}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self.columns.items()}

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={tuple(column.shape)}" for name, column in self.columns.items())
        return f"Columns({inside})"


def _as_tensor(name: str, column: Any) -> Tensor:
    if isinstance(column, np.ndarray):
        column = _share(name, column)
    if not isinstance(column, Tensor):
        why = f"column {name!r} is {type(column).__name__}, not a tensor or a NumPy array; torch.tensor(...) makes one"
        raise ConfigError("data", why)
    if column.ndim == 0:
        raise ConfigError("data", f"column {name!r} is a single number; it needs one row per sample")
    return column


def _share(name: str, array: NDArray[Any]) -> Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no negative strides
    try:
        with warnings.catch_warnings():
            # Read-only memory, a mapped file for one, is fine: nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise ConfigError("data", f"column {name!r} holds {array.dtype}, which no tensor can: {error}") from error


def whole_rows(dataset: object) -> Rows | None:
    """What default_collate would make of the samples with these ids, by one look-up per tensor; None if that cannot be.

    It can be for `Columns`, `TensorDataset` and `Subset`s of them, exactly these types: a subclass may do more per
    sample. A subset's indices are taken as they are now.
    """
    chosen: Ids | None = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or (indices.size and indices.min() < 0):
            return None
        chosen = indices.astype(np.int64) if chosen is None else indices.astype(np.int64)[chosen]
        dataset = dataset.dataset
    tables: tuple[Tensor, ...]
    if type(dataset) is Columns:
        tables, names = tuple(dataset.columns.values()), tuple(dataset.columns)
    elif type(dataset) is TensorDataset:
        tables, names = dataset.tensors, None
    else:
        return None
    if any(type(table) is not Tensor or not _can_look_up(table) for table in tables):
        return None
    return partial(_look_up, tables, names, chosen)


def _can_look_up(table: Tensor) -> bool:
    """Whether index_select knows this layout and element type; it lacks some that stacking rows has."""
    try:
        table.index_select(0, torch.zeros(min(1, len(table)), dtype=torch.int64, device=table.device))
    except (RuntimeError, NotImplementedError):
        return False
    return table.layout == torch.strided


def _look_up(tables: tuple[Tensor, ...], names: tuple[str, ...] | None, chosen: Ids | None, ids: Ids) -> Any:
    if chosen is not None:
        ids = chosen[ids]
    elif not ids.flags.writeable:
        ids = ids.copy()  # from_numpy would warn
    rows = torch.from_numpy(ids)
    found = [table.index_select(0, rows if table.is_cpu else rows.to(table.device)) for table in tables]
    return found if names is None else dict(zip(names, found, strict=True))
