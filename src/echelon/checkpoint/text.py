"""Plain Python values as JSON text and back without loss: a tuple stays a tuple, a key its type, a float its bits.

What JSON has by itself is written as it is. Everything else is an object with the one reserved key `~`:

    (1, 2)            {"~": "tuple", "v": [1, 2]}
    {7: "a"}          {"~": "dict", "v": [[7, "a"]]}
    Counter({3: 2})   {"~": "counter", "v": [[3, 2]]}
    float("nan")      {"~": "float", "v": "7ff8000000000000"}       IEEE 754 bits, big-endian
    a tensor          {"~": "tensor", "v": "values['ema']"}         its name in `tensors`

A value that occurs twice is written twice; a `defaultdict` becomes a `dict`, since a factory is code.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from echelon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

TAG = "~"
MAX_DEPTH = 100  # of nesting; Python's own JSON reader gives up at some hundreds
NUMPY_KINDS = frozenset("biufcSUMm")  # what a dtype's name and its bytes describe completely
EMPTY = {empty.dtype.str: empty for empty in (np.str_(""), np.bytes_(b""))}  # no bytes to read a scalar from
MAPPINGS: dict[type, str] = {dict: "dict", defaultdict: "dict", OrderedDict: "ordered", Counter: "counter"}
SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def pack(values: Any, tensors: dict[str, Tensor] | None = None, path: str = "values") -> Any:
    """`values` as JSON-able ones. Tensors go into `tensors` under their path, or are refused where there is none.

    Raises `ConfigError` whose term is the path of what cannot be written, e.g. `values['schedule'][3]`.
    """
    return _Packer(tensors).pack(values, path, 0)


def unpack(packed: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """What `pack` was given. Raises `ValueError` for anything that `pack` does not write."""
    try:
        return _unpack(packed, tensors or {}, 0)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
        raise ValueError(f"not packed values: {type(error).__name__}: {error}") from error


class _Packer:
    def __init__(self, tensors: dict[str, Tensor] | None) -> None:
        self._tensors = tensors

    def pack(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ConfigError(path[:80] + "...", f"is nested more than {MAX_DEPTH} deep, or contains itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is list:
            return self._items(value, path, depth)
        if kind in MAPPINGS:
            return self._mapping(value, path, depth)
        if kind in SEQUENCES:
            return self._sequence(value, path, depth)
        atom = _pack_atom(value)
        if atom is None:
            raise ConfigError(
                path, f"a {kind.__module__}.{kind.__qualname__} cannot be saved; use plain values or tensors"
            )
        return atom

    def _items(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.pack(value, f"{path}[{index}]", depth + 1) for index, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        name = MAPPINGS[type(value)]
        if name == "dict" and TAG not in value and all(type(key) is str and not _has_surrogate(key) for key in value):
            return {key: self.pack(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = []
        for index, (key, item) in enumerate(value.items()):
            packed = self.pack(key, f"{path} key {index}", depth + 1)  # first: only a plain key is safe to print
            pairs.append([packed, self.pack(item, f"{path}[{_show(key)}]", depth + 1)])
        return {TAG: name, "v": pairs}

    def _sequence(self, value: Any, path: str, depth: int) -> Any:
        items = self._items(value, path, depth)
        if type(value) is not tuple:
            items.sort(key=repr)  # the same set is the same text, whatever the hash seed of the process
        return {TAG: SEQUENCES[type(value)], "v": items}

    def _tensor(self, value: Tensor, path: str) -> Any:
        if self._tensors is None:
            raise ConfigError(path, "is a tensor, and only plain values can be saved here")
        if path in self._tensors:
            raise ConfigError(path, "names two tensors")
        self._tensors[path] = value.detach()
        return {TAG: "tensor", "v": path}


def _pack_atom(value: Any) -> Any:
    """A value without parts, or None where there is no way to write it."""
    kind = type(value)
    if kind is int:
        # Decimal text of a huge int costs quadratic time and Python refuses to read it; hexadecimal does not.
        return value if -(2**63) <= value < 2**64 else {TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}
    if kind is str:
        return value if not _has_surrogate(value) else {TAG: "str", "v": value.encode("utf-8", "surrogatepass").hex()}
    if kind is bytes:
        return {TAG: "bytes", "v": value.hex()}
    if kind is complex:
        return {TAG: "complex", "v": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is torch.dtype:
        return {TAG: "dtype", "v": str(value).removeprefix("torch.")}
    if kind is np.ndarray and value.dtype.kind in NUMPY_KINDS and value.dtype.itemsize:
        return {TAG: "array", "v": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    if isinstance(value, np.generic) and value.dtype.kind in NUMPY_KINDS:
        return {TAG: "numpy", "v": [value.dtype.str, value.tobytes().hex()]}
    return None


def _show(key: Any) -> str:
    # Python refuses to print an int of more than some thousand digits.
    return hex(key) if type(key) is int and abs(key) >= 2**64 else repr(key)


def _has_surrogate(text: str) -> bool:
    # JSON reads two of them as one character.
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def _unpack(packed: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > 2 * MAX_DEPTH + 2:
        raise ValueError("nested too deep")
    if isinstance(packed, list):
        return [_unpack(item, tensors, depth + 1) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if TAG not in packed:
        return {key: _unpack(item, tensors, depth + 1) for key, item in packed.items()}
    name, content = packed[TAG], packed["v"]
    if name == "tensor":
        return tensors[content]
    if name in ATOMS:
        return ATOMS[name](content)
    items = [_unpack(item, tensors, depth + 1) for item in content]
    if name == "counter":
        counter: Counter[Any] = Counter()
        # Not through the constructor, which would count the pairs.
        dict.update(counter, ((key, value) for key, value in items))
        return counter
    return CONTAINERS[name](items)


def _number(content: str) -> Any:
    return struct.unpack(">d", bytes.fromhex(content))[0]


def _complex(content: str) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(content)))


def _dtype(content: str) -> torch.dtype:
    return {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}["torch." + content]


def _array(content: list[Any]) -> np.ndarray[Any, Any]:
    kind, shape, data = content
    dtype = np.dtype(kind)
    if dtype.kind not in NUMPY_KINDS or dtype.str != kind:
        raise ValueError(f"no array of {kind}")
    return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()


def _scalar(content: list[Any]) -> Any:
    kind, data = content
    if kind in EMPTY:
        return EMPTY[kind]
    return _array([kind, [], data])[()]


ATOMS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": _number,
    "str": lambda content: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "complex": _complex,
    "dtype": _dtype,
    "array": _array,
    "numpy": _scalar,
}
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "ordered": OrderedDict,
}
