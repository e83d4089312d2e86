"""The file format: every dtype and layout, exchangeable with the safetensors library, and nothing believed on sight."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.checkpoint import tensors as module
from echelon.checkpoint.tensors import DTYPES, find_ties, pieces, read_tensors, write_tensors
from echelon.errors import CheckpointCorrupt, ConfigError, StorageFailed


def raw(tensor):
    return b"".join(bytes(piece) for piece in pieces(tensor))


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def of_bytes(dtype, *shape):
    """Every bit pattern of a dtype may occur in a model, the NaNs included."""
    count = math.prod(shape) * dtype.itemsize
    source = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return source.view(dtype).reshape(shape)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_bit_for_bit_here_and_through_the_library(dtype, path):
    tensor = of_bytes(dtype, 4, 6)
    given_ = {
        "plain": tensor,
        "scalar": of_bytes(dtype, 1)[0],
        "empty": of_bytes(dtype, 0, 3),
        "turned": tensor.t(),
        "strided": tensor[::2, 1::2],
        "offset": tensor[2:],
        "expanded": tensor[:1].expand(5, 6),
        "parameter": tensor,
    }
    write_tensors(path, given_, {})
    back = read_tensors(path)
    library = safetensors.torch.load_file(path)
    assert back.keys() == library.keys() == given_.keys()
    for name, expected in given_.items():
        assert same(back[name], expected), name
        assert same(library[name], expected), name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_files_of_the_library_are_read(dtype, path):
    given_ = {
        "b": of_bytes(dtype, 3, 2),
        "a": of_bytes(dtype, 7),
        "e": of_bytes(dtype, 0),
        "half": torch.ones(3).half(),
    }
    safetensors.torch.save_file(given_, path, metadata={"format": "pt"})
    back = read_tensors(path)
    assert back.keys() == given_.keys()
    assert all(same(back[name], given_[name]) for name in given_)


def test_the_returned_hash_is_that_of_the_file(path):
    given_ = {f"t{i}": torch.randn(i * 37) for i in range(200)} | {"big": torch.randn(3_000_000)}
    assert write_tensors(path, given_, {"a": "b"}) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_metadata_is_what_the_library_finds(path):
    write_tensors(path, {"a": torch.zeros(2)}, {"format": "pt", "note": "ä"})
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ä"}


def test_no_tensors_at_all_is_a_file_too(path):
    write_tensors(path, {}, {})
    assert read_tensors(path) == {}
    assert safetensors.torch.load_file(path) == {}


def test_a_large_turned_tensor_is_written_in_parts_and_comes_back(path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    given_ = {"turned": torch.randn(40, 30).t(), "row": torch.randn(90)[::3], "wide": torch.randn(200, 3).t()}
    assert len(list(pieces(given_["turned"]))) > 5
    write_tensors(path, given_, {})
    assert all(same(tensor, given_[name]) for name, tensor in read_tensors(path).items())


def test_conjugate_and_negated_views_are_written_as_what_they_stand_for(path):
    source = torch.randn(3, dtype=torch.complex64)
    write_tensors(path, {"conjugate": source.conj(), "negated": source.conj().imag}, {})
    back = read_tensors(path)
    assert torch.equal(back["conjugate"], source.conj().clone())
    assert torch.equal(back["negated"], source.conj().imag.clone())


def test_odd_names_come_back(path):
    names = ["", "ä/β", 'quote"', "back\\slash", "new\nline", "\x00", "\U0001f600", "a.b.c"]
    write_tensors(path, {name: torch.tensor(float(i)) for i, name in enumerate(names)}, {})
    assert {name: tensor.item() for name, tensor in read_tensors(path).items()} == {
        n: float(i) for i, n in enumerate(names)
    }
    assert safetensors.torch.load_file(path).keys() == set(names)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("double complex", torch.zeros(2, dtype=torch.complex128)),
        ("sparse", torch.eye(3).to_sparse()),
        ("meta", torch.zeros(2, device="meta")),
        ("__metadata__", torch.zeros(1)),
        ("lone \ud800", torch.zeros(1)),
        (3, torch.zeros(1)),
        ("nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(name, tensor, path):
    with pytest.raises(ConfigError) as refused:
        write_tensors(path, {"fine": torch.zeros(1), name: tensor}, {})
    assert refused.value.term == (repr(name) if name == 3 or "\ud800" in name else name)
    assert not path.exists()


def test_tied_means_the_very_same_elements():
    base = torch.arange(12.0)
    given_ = {
        "b": base,
        "a": base.view(12),
        "part": base[:6],
        "shape": base.view(3, 4),
        "type": base.view(torch.int32),
        "copy": base.clone(),
        "empty1": torch.zeros(0),
        "empty2": torch.zeros(0),
        "c": torch.nn.Parameter(base),
    }
    assert find_ties(given_) == {"b": "a", "c": "a"}


def test_a_file_with_another_hash_is_refused(path):
    sha256 = write_tensors(path, {"a": torch.zeros(3)}, {})
    assert read_tensors(path, sha256).keys() == {"a"}
    with pytest.raises(CheckpointCorrupt, match="SHA-256"):
        read_tensors(path, "0" * 64)


def test_a_missing_file_is_a_storage_failure(path):
    with pytest.raises(StorageFailed):
        read_tensors(path)


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", tmp_path):
        with pytest.raises(CheckpointCorrupt, match="regular"):
            read_tensors(odd)


def file_of(header, data=b"", pad=b""):
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + pad
    return len(text).to_bytes(8, "little") + text + data


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        file_of(b""),
        file_of(b"[]"),
        file_of(b"[" * 100_000),
        file_of(b'{"a":' * 100_000),
        file_of(b"\xff\xfe"),
        file_of({"a": F4}),
        file_of({"a": F4}, b"12345"),
        file_of({"a": F4, "b": F4}, b"1234"),
        file_of({"a": {**F4, "data_offsets": [4, 8]}}, b"12345678"),
        file_of({"a": {**F4, "data_offsets": [4, 0]}}, b"1234"),
        file_of({"a": {**F4, "data_offsets": [-4, 0]}}, b""),
        file_of({"a": {**F4, "shape": [2]}}, b"1234"),
        file_of({"a": {**F4, "shape": [-1]}}, b"1234"),
        file_of({"a": {**F4, "shape": [-1, -1]}}, b"1234"),
        file_of({"a": {**F4, "shape": [True]}}, b"1234"),
        file_of({"a": {**F4, "shape": [1.0]}}, b"1234"),
        file_of({"a": {**F4, "shape": "1"}}, b"1234"),
        file_of({"a": {**F4, "shape": [1] * 65}}, b"1234"),
        file_of({"a": {**F4, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}),
        file_of({"a": {**F4, "shape": [2**62], "data_offsets": [0, 2**64]}}),
        file_of({"a": {**F4, "dtype": "F31"}}, b"1234"),
        file_of({"a": {**F4, "dtype": ["F32"]}}, b"1234"),
        file_of({"a": {**F4, "more": 1}}, b"1234"),
        file_of({"a": 3}),
        file_of({"__metadata__": {"a": 3}}),
        file_of({"__metadata__": 3}),
        file_of(b'{"a":%s,"a":%s}' % ((json.dumps(F4).encode(),) * 2), b"1234"),
        file_of(b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % (b"9" * 5000), b"1234"),
    ],
)
def test_a_malformed_file_is_corrupt(content, path):
    path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt):
        read_tensors(path)


entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", ""]),
        "shape": st.lists(st.one_of(st.integers(-1, 5), st.sampled_from([2**31, 2**61, 2**63, 2**64])), max_size=4),
        "data_offsets": st.lists(st.integers(-1, 40), max_size=3),
    }
)
headers = st.dictionaries(st.text(max_size=2), st.one_of(entry, st.none(), st.integers()), max_size=3)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.one_of(
        st.binary(max_size=80),
        st.builds(file_of, headers, st.binary(max_size=40)),
        st.builds(file_of, st.binary(max_size=60)),
    )
)
def test_any_bytes_give_tensors_or_corruption_and_nothing_else(path, content):
    path.write_bytes(content)
    try:
        read = read_tensors(path)
    except CheckpointCorrupt:
        return
    assert sum(tensor.numel() * tensor.element_size() for tensor in read.values()) <= len(content)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_valid_file_with_some_bytes_changed_gives_tensors_or_corruption(path, data):
    write_tensors(path, {"a": torch.arange(3), "b": torch.zeros(2, 2), "c": torch.zeros(0, 4)}, {"format": "pt"})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(CheckpointCorrupt):
        read_tensors(path)


def test_a_lie_about_the_size_takes_no_memory(path, monkeypatch):
    path.write_bytes(file_of({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b"1234"))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("memory was taken"))
    with pytest.raises(CheckpointCorrupt):
        read_tensors(path)


def test_a_header_longer_than_the_file_is_not_waited_for_in_memory(path):
    path.write_bytes((50_000_000).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointCorrupt, match="claims a header of 50000000"):
        read_tensors(path)
