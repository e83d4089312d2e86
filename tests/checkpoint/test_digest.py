"""The digest of the public contract, against a second way to compute it."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import nn

from echelon.checkpoint import digest


def test_the_digest_of_a_small_model_is_the_documented_one_byte_by_byte():
    expected = hashlib.sha256()
    expected.update(b"b\x00torch.int64\x00()\x00" + struct.pack("<q", 7))
    expected.update(b"w\x00torch.float32\x00(2, 3)\x00" + struct.pack("<6f", *range(6)))
    expected.update("ä".encode() + b"\x00torch.bool\x00(2,)\x00\x01\x00")
    given = {
        "w": torch.arange(6.0).reshape(2, 3),
        "ä": torch.tensor([True, False]),
        "b": torch.tensor(7),
    }
    assert digest(given) == expected.hexdigest()


def test_no_tensors_is_the_hash_of_nothing():
    assert digest({}) == hashlib.sha256().hexdigest()


def test_order_strides_and_gradients_make_no_difference():
    weight = torch.randn(4, 5)
    one = digest({"a": weight, "b": torch.ones(2)})
    assert one == digest({"b": torch.ones(4)[::2], "a": nn.Parameter(weight.t().contiguous().t())})


def test_one_bit_a_name_a_shape_or_a_dtype_makes_a_difference():
    changed = torch.zeros(4)
    changed.view(torch.int32)[3] = 1
    digests = {
        digest(tensors)
        for tensors in (
            {"a": torch.zeros(4)},
            {"b": torch.zeros(4)},
            {"a": torch.zeros(2, 2)},
            {"a": torch.zeros(4, dtype=torch.int32)},
            {"a": changed},
            {"a": -torch.zeros(4)},
            {"a": torch.zeros(4), "b": torch.zeros(0)},
        )
    }
    assert len(digests) == 7


def test_a_tied_tensor_counts_once_under_its_first_name():
    weight = torch.randn(3)
    assert digest({"z": weight, "a": weight}) == digest({"a": weight})
    assert digest({"z": weight.clone(), "a": weight}) != digest({"a": weight})


def test_double_complex_numbers_have_a_digest_though_they_cannot_be_saved():
    value = torch.tensor([1 + 2j], dtype=torch.complex128)
    expected = b"a\x00torch.complex128\x00(1,)\x00" + struct.pack("<dd", 1, 2)
    assert digest({"a": value}) == hashlib.sha256(expected).hexdigest()
