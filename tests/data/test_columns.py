"""Columns are a dataset like any other, and whole look-ups give what collating their samples gives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from echelon.data.columns import Columns, whole_rows
from echelon.errors import ConfigError

IDS = np.array([3, 0, 3, 7])


def same(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


X = torch.randn(8, 3, 4, 5)
KINDS = torch.bool, torch.bfloat16, torch.complex64, torch.uint8
TABLES = {
    "columns": Columns(x=X, y=np.arange(8), self=np.arange(8) > 3, half=X.half()),
    "tensors": TensorDataset(X, torch.arange(8)),
    "one tensor": TensorDataset(torch.arange(8)),
    "strided": TensorDataset(X.to(memory_format=torch.channels_last), X.transpose(1, 3), torch.arange(16)[::2]),
    "kinds": TensorDataset(*(torch.arange(8).to(kind) for kind in KINDS)),
    "subset": Subset(TensorDataset(torch.arange(100) * 10), [5, 3, 99, 7, 1, 0, 2, 4]),
    "subset of subset": Subset(Subset(Columns(x=torch.arange(100)), range(50, 100)), torch.arange(9, 1, -1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_a_look_up_is_what_collating_the_samples_gives(kind):
    dataset = TABLES[kind]
    rows = whole_rows(dataset)
    assert rows is not None
    assert same(rows(IDS), default_collate([dataset[int(i)] for i in IDS]))


class Scaled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def test_datasets_that_may_do_more_per_sample_are_left_to_do_it():
    assert whole_rows(Scaled(X)) is None
    assert whole_rows(Subset(Scaled(X), [1])) is None
    assert whole_rows(Subset(TensorDataset(X), [-1])) is None
    assert whole_rows([1, 2]) is None
    assert whole_rows(TensorDataset(torch.eye(3).to_sparse())) is None


def test_a_column_shares_the_memory_of_its_array():
    array = np.zeros(3)
    columns = Columns(x=array)
    array[1] = 5
    assert columns[1]["x"] == 5


def test_read_only_and_reversed_arrays_are_taken_without_a_warning():
    frozen = np.arange(4)
    frozen.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns = Columns(a=frozen, b=np.arange(4)[::-1])
        assert [columns[0]["a"].item(), columns[0]["b"].item()] == [0, 3]
        ids = np.array([1])
        ids.setflags(write=False)
        assert whole_rows(columns)(ids)["b"].item() == 2


def test_columns_have_a_length_rows_and_an_end():
    columns = Columns(x=torch.arange(3), y=torch.zeros(3, 2))
    assert len(columns) == 3
    assert repr(columns) == "Columns(x=(3,), y=(3, 2))"
    assert [row["x"].item() for row in columns] == [0, 1, 2]
    with pytest.raises(IndexError):
        columns[3]


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({}, "at least one"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "'y': 3"),
        ({"x": [1, 2]}, "torch.tensor"),
        ({"x": torch.tensor(1)}, "'x'"),
        ({"x": np.array(["a", "b"])}, "'x'"),
        ({"x": np.array([None])}, "object"),
        ({"x": np.arange(3).astype(">i4")}, "'x'"),
    ],
)
def test_what_cannot_be_columns_says_why(columns, word):
    with pytest.raises(ConfigError, match="data: ") as caught:
        Columns(**columns)
    assert word in caught.value.why
