"""The same samples have the same fingerprint, other samples another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from echelon.data.fingerprint import fingerprint
from echelon.data.reader import Reader


class Pair(NamedTuple):
    a: Any
    b: Any


VALUES = [
    torch.ones(3),
    torch.ones(3).double(),
    torch.zeros(3),
    torch.ones(3, 1),
    torch.ones(2, dtype=torch.bfloat16),
    np.ones(3),
    np.array(["a", None], dtype=object),
    {"x": torch.ones(3), "y": 1},
    {"x": torch.ones(3), "y": 2},
    [1, [2, 3]],
    [[1, 2], 3],
    (1, 2),
    Pair(1, 2),
    "text",
    b"text",
    None,
    1.5,
]


def test_different_values_have_different_fingerprints():
    assert len({fingerprint(value) for value in VALUES}) == len(VALUES)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_equal_values_have_equal_fingerprints(value):
    copy = value.clone() if isinstance(value, torch.Tensor) else value
    assert fingerprint(copy) == fingerprint(value)


class Drawn:
    """Samples drawn when they are read, under the seed they are given."""

    def __init__(self, size=10, shift=0.0):
        self.size, self.shift = size, shift

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.rand(2) + self.shift


def test_a_dataset_is_known_by_its_samples_and_its_length():
    same, other = Reader(Drawn(), None, 3), Reader(Drawn(), None, 3)
    assert same.fingerprint() == other.fingerprint() == same.fingerprint()
    assert Reader(Drawn(shift=1.0), None, 3).fingerprint() != same.fingerprint()
    assert Reader(Drawn(size=11), None, 3).fingerprint() != same.fingerprint()


def test_a_sample_that_cannot_be_read_is_left_to_training():
    class Broken(Drawn):
        def __getitem__(self, index):
            raise OSError("not there")

    assert Reader(Broken(), None, 0).fingerprint() == Reader(Broken(), None, 0).fingerprint()
