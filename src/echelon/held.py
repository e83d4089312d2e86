"""Which random generators an object can reach, found by looking and never by calling.

A dataset may hold a generator in an attribute, in a transform of a transform, in a closure, a default argument or a
global that one of its methods names. Whoever wants its samples to be a function of a seed has to find them all:

    dataset -> attributes -> lists, dicts -> objects -> their class -> functions -> the globals that their code names
"""

from __future__ import annotations

import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

# Functions that read, save or restore random state: code that uses one can depend on the state without moving it.
PEEKING = frozenset(
    {
        *("fork_rng", "isolate_rng", "initial_seed", "get_bit_generator", "clone_state"),
        *("getstate", "get_state", "get_rng_state", "get_rng_state_all", "graphsafe_get_state"),
        *("setstate", "set_state", "set_rng_state", "set_rng_state_all", "graphsafe_set_state"),
    }
)
# Library code is judged by what a sample passes through only: a whole library names everything somewhere.
_ON_THE_WAY = frozenset(("__getitem__", "__getitems__", "__call__", "forward"))

_MOST_OBJECTS = 200_000
_MOST_ITEMS = 10_000  # of one list, tuple, dict
_DEEPEST = 60

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The generators in the order in which they were reached, nearest first, each once and none of the process's own.

    Of a NumPy `Generator` it is the bit generator, where its state lives. `peeks`: the code reached names one of
    `PEEKING`.
    """

    generators: tuple[object, ...]
    peeks: bool


def search(*objects: object) -> Found:
    """What these objects can reach, breadth first, within bounds of depth and number.

    Not reached: what only a property, `__getattr__` or an iterator would produce, what is kept in a set, and generators
    inside extension types.
    """
    looking = _Search()
    looking.run(objects)
    return Found(generators=tuple(looking.found), peeks=looking.peeks)


class _Search:
    def __init__(self) -> None:
        import numpy as np
        import torch

        self.found: list[object] = []
        self.peeks = False
        self._generators = (random.Random, np.random.RandomState, np.random.BitGenerator, torch.Generator)
        self._numpy_generator = np.random.Generator
        # SystemRandom has no state. CUDA's default generators exist once CUDA is in use.
        self._leaves = (*_LEAVES, random.SystemRandom, torch.Tensor, np.ndarray, np.generic, types.ModuleType)
        self._places = _Places(silent=(torch.__file__, np.__file__, __file__))
        own = (
            _owner(random.seed),
            _owner(np.random.random),
            np.random.mtrand.get_bit_generator(),
            torch.default_generator,
        )
        known = (*own, *torch.cuda.default_generators)
        self._seen: dict[int, tuple[object, bool]] = {id(thing): (thing, False) for thing in known}

    def run(self, objects: Iterable[object]) -> None:
        queue: deque[tuple[Any, int, bool]] = deque((thing, 0, False) for thing in objects)
        while queue and len(self._seen) < _MOST_OBJECTS:
            thing, depth, in_library = queue.popleft()
            kind = type(thing)
            if issubclass(kind, self._leaves) or not self._is_news(thing, in_library):
                continue
            if issubclass(kind, self._generators):
                if not any(thing is other for other in self.found):
                    self.found.append(thing)
            elif issubclass(kind, self._numpy_generator):
                queue.append((thing.bit_generator, depth, in_library))
            elif depth < _DEEPEST:
                queue.extend((child, depth + 1, deep) for child, deep in self._children(thing, in_library))

    def _is_news(self, thing: object, in_library: bool) -> bool:
        """Not seen yet, or seen only from within a library, from where less of it is looked at."""
        _, before = self._seen.get(id(thing), (None, True))
        if id(thing) in self._seen and before <= in_library:
            return False
        self._seen[id(thing)] = thing, in_library  # keeps it alive: an id says nothing once its object is gone
        return True

    def _children(self, thing: Any, in_library: bool) -> Iterator[tuple[object, bool]]:
        """What is one step away, and whether that step goes out of a library's code.

        A library's code is read when an object or the user's code leads to it, but not what it leads to in turn.
        """
        kind = type(thing)
        if kind is types.FunctionType:
            place = self._places.of(thing.__code__.co_filename)
            if place == "user" or (place == "library" and not in_library):
                yield from ((child, place == "library") for child in self._read_function(thing, place))
        elif kind in _BOUND:
            yield thing.__self__, in_library
        elif issubclass(kind, type):
            yield from ((child, in_library) for child in (*_namespace(thing).values(), *_bases(thing)))
        else:
            yield from ((child, in_library) for child in islice(_items(thing), _MOST_ITEMS))
            yield from ((child, in_library) for child in _attributes(thing))
            yield kind, in_library

    def _read_function(self, function: types.FunctionType, place: str) -> Iterator[Any]:
        names = set(_names(function.__code__))
        watched = place == "user" or function.__name__ in _ON_THE_WAY
        self.peeks |= watched and not names.isdisjoint(PEEKING)
        yield function.__defaults__
        yield function.__kwdefaults__
        yield function.__dict__
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # a variable that has no value yet
                yield cell.cell_contents
        for value in self._named(function, names):
            self.peeks |= watched and type(value) in _FUNCTIONS and value.__name__ in PEEKING
            yield value

    def _named(self, function: types.FunctionType, names: set[str]) -> Iterator[Any]:
        """The globals that the code names, and what it names inside the modules among them."""
        ordered = sorted(names)  # a set's own order differs between processes
        scopes = deque([function.__globals__])
        entered: set[int] = set()
        while scopes:
            scope = scopes.popleft()
            for name in ordered:
                value = scope.get(name)
                if value is None and scope is function.__globals__:
                    value = sys.modules.get(name)  # imported by the function itself
                if not issubclass(type(value), types.ModuleType):
                    yield value
                    continue
                # Past a lazy module's own attribute access, which would load it.
                inside = object.__getattribute__(value, "__dict__")
                if id(value) not in entered and self._places.of(inside.get("__file__")) != "silent":
                    entered.add(id(value))
                    scopes.append(inside)


class _Places:
    """Whose code a file holds: the user's, a library's, or that of one known to hold no generator ("silent")."""

    def __init__(self, silent: Iterable[str | None]) -> None:
        paths = sysconfig.get_paths()
        self._silent = tuple(f"{Path(file).parent}/" for file in silent if file)
        self._library = tuple({f"{paths[name]}/" for name in ("purelib", "platlib")})
        self._python = (*{f"{paths[name]}/" for name in ("stdlib", "platstdlib")}, "<frozen")

    def of(self, file: str | None) -> str:
        if file is None:
            return "user"
        if file.startswith(self._silent):
            return "silent"
        if file.startswith(self._library):
            return "library"
        return "silent" if file.startswith(self._python) else "user"


def _owner(method: Any) -> object:
    return method.__self__


def _items(thing: Any) -> Iterator[object]:
    """The items of a container, past any override. Keys are left out: a generator as a key is nobody's habit."""
    kind = type(thing)
    if issubclass(kind, dict):
        yield from dict.values(thing)
    elif issubclass(kind, list):
        yield from list.__iter__(thing)
    elif issubclass(kind, tuple):
        yield from tuple.__iter__(thing)
    elif issubclass(kind, deque):
        yield from deque.__iter__(thing)


def _attributes(thing: object) -> Iterator[object]:
    """The values of instance attributes and slots (of built-in types: of what they wrap), past any override."""
    with suppress(AttributeError, TypeError):
        yield from dict.values(object.__getattribute__(thing, "__dict__"))
    for base in _mro(type(thing)):
        for member in _namespace(base).values():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError, TypeError, ValueError):
                    yield member.__get__(thing)


# A metaclass may override these; what `type` itself says is what is there.
_namespace: Callable[[type], Mapping[str, object]] = type.__dict__["__dict__"].__get__
_bases: Callable[[type], tuple[type, ...]] = type.__dict__["__bases__"].__get__
_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
