"""Tensors to and from safetensors files, one piece at a time: no second copy of the model, nothing allocated on trust.

    8 bytes   length of the header, little-endian
    header    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    data      the tensors' little-endian bytes, back to back, without gaps

https://github.com/huggingface/safetensors#format. The files are interchangeable with that library's.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from echelon.checkpoint.disk import CHUNK_BYTES, HashedFile, HashedInput, reading
from echelon.errors import CheckpointCorrupt, ConfigError
from echelon.storage import writing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the library's own bound
MAX_DIMS = 64  # what torch's and NumPy's kernels can walk through
MAX_ELEMENTS = 1 << 62
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor's place in the data; ordered as the bytes are."""

    start: int
    stop: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Writes the file, flushed to the disk, and returns its SHA-256. Tied tensors are written once for each name."""
    with writing(path):
        return stream_tensors(path, tensors, metadata).sha256


def stream_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> HashedFile:
    """As `write_tensors`, for callers who know better than this file's name what an `OSError` is about."""
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    # The library's order: wide elements first keeps every tensor aligned for readers that map the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        stop = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError("model", f"its {len(names)} tensor names do not fit into a safetensors header")
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in pieces(tensors[name]):
                file.write(piece)
    return file


def read_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU. `CheckpointCorrupt` if it is malformed or has not the SHA-256 given."""
    with reading(path), HashedInput(path) as file:
        entries = _read_header(path, file)
        tensors = {}
        for entry in entries:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            if tensor.numel():
                file.fill(_bytes_of(tensor))
            tensors[entry.name] = tensor
        if sha256 is not None and file.sha256 != sha256:
            raise CheckpointCorrupt(str(path), "its content is not what was written (SHA-256 differs)")
    return tensors


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuses what is not simply elements in memory."""
    if not _is_utf8(name):
        raise ConfigError(repr(name), "is no name a tensor can be saved under; use text")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ConfigError(name, f"is a {type(tensor).__name__}, not a plain tensor; save its full value")
    if tensor.layout != torch.strided:
        raise ConfigError(name, "is sparse, and only dense tensors can be saved")
    if tensor.device.type == "meta":
        raise ConfigError(name, "has no values yet (it is on the meta device)")


def check_storable(name: str, tensor: Tensor) -> None:
    """As `check_plain`, and the file format must know its dtype."""
    check_plain(name, tensor)
    if name == METADATA:
        raise ConfigError(name, "is a reserved name in safetensors files")
    if tensor.dtype not in CODES:
        raise ConfigError(name, f"{tensor.dtype} cannot be saved: the safetensors format does not have it")


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's elements in row-major order as bytes. Where they do not lie so, a few MiB are copied at a time."""
    if tensor.numel() == 0:
        return
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type == "cpu" and plain.is_contiguous():
        yield _bytes_of(plain)
        return
    rows = plain.reshape(1) if plain.dim() == 0 else plain
    row_bytes = plain.numel() * plain.element_size() // len(rows)
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        yield _bytes_of(rows[start : start + step].cpu().contiguous())


def find_ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that stand for the very elements of another, each with the first such name in sorted order.

    Tied means the same storage, offset, shape, stride and dtype. Tensors without elements are never tied.
    """
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in tensors.items():
        check_plain(name, tensor)
    for name in sorted(tensors):
        if tensors[name].numel():
            owner = first.setdefault(_identity(tensors[name]), name)
            if owner != name:
                ties[name] = owner
    return ties


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _bytes_of(tensor: Tensor) -> memoryview:
    assert sys.byteorder == "little", "files and digests are little-endian"
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_header(path: Path, file: HashedInput) -> list[Entry]:
    """The entries in the order of their bytes, each checked against the size of the file."""
    if file.size_bytes < 8:
        raise CheckpointCorrupt(str(path), "is too short for a safetensors file")
    length = int.from_bytes(file.take(8), "little")
    data_bytes = file.size_bytes - 8 - length
    if length > MAX_HEADER_BYTES or data_bytes < 0:
        raise CheckpointCorrupt(str(path), f"claims a header of {length} bytes")
    try:
        header = json.loads(file.take(length).decode(), object_pairs_hook=_unique)
        entries = sorted(_entry(name, place) for name, place in header.items() if name != METADATA)
        _check_metadata(header.get(METADATA, {}))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(str(path), f"has no valid safetensors header ({error})") from error
    offset = 0
    for entry in entries:
        if entry.start != offset:
            raise CheckpointCorrupt(str(path), f"tensor {entry.name} does not follow the one before it")
        offset = entry.stop
    if offset != data_bytes:
        raise CheckpointCorrupt(str(path), f"holds {data_bytes} bytes of tensors where its header says {offset}")
    return entries


def _entry(name: str, place: dict[str, Any]) -> Entry:
    if place.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has unknown fields")
    dtype, shape, (start, stop) = DTYPES[place["dtype"]], place["shape"], place["data_offsets"]
    if type(shape) is not list or len(shape) > MAX_DIMS:
        raise ValueError(f"{name} has no valid shape")
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name} has no valid shape or offsets")
    # Zero dimensions counted as one: torch multiplies the others into strides.
    if math.prod(max(1, size) for size in shape) > MAX_ELEMENTS:
        raise ValueError(f"{name} is too large")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has a size that its shape does not have")
    return Entry(start, stop, name, dtype, tuple(shape))


def _check_metadata(metadata: Any) -> None:
    if not all(type(value) is str for value in metadata.values()):
        raise ValueError("its metadata is not text")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _is_utf8(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
