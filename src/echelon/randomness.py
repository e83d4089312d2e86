"""Every random number has a seed of its own: seeds derived from names, and the generators they are put into.

The first half is pure. The second half acts: it finds the generators that user code may draw from and sets them all.
Importing this file loads neither torch nor numpy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from echelon.held import search

if TYPE_CHECKING:
    import numpy as np

_64_BITS = 2**64 - 1
_32_BITS = 2**32 - 1


def derive(seed: int, *path: int | str) -> int:
    """A 64-bit number, 0 <= n < 2**64, for this path of names and numbers below `seed`.

    It is the 8-byte BLAKE2b digest (no key, no salt), read as a little-endian unsigned number, of the packed parts,
    seed first: an int is its value modulo 2**64 in 8 little-endian bytes (so -1 packs as a signed 64-bit -1), a str is
    the number of its UTF-8 bytes, packed like an int, followed by those bytes. Begin each path with a word of its own.
    """
    return _number(_pack(seed, *path))


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """What the dataset draws from while it makes this sample in this epoch, whoever reads it."""
    return derive(seed, "sample", epoch, sample)


def sample_seeds(seed: int, epoch: int, samples: Iterable[int]) -> list[int]:
    """`sample_seed` of each sample, at a third of the cost."""
    prefix = _pack(seed, "sample", epoch)
    return [_number(prefix + (sample & _64_BITS).to_bytes(8, "little")) for sample in samples]


def slice_seed(seed: int, step: int, slice_: int) -> int:
    """What the model draws from while it computes this slice of this step, whoever computes it."""
    return derive(seed, "slice", step, slice_)


def init_seed(seed: int) -> int:
    """What the initial weights are drawn from."""
    return derive(seed, "init")


def order_seed(seed: int, epoch: int) -> int:
    """The key of this epoch's order of samples."""
    return derive(seed, "order", epoch)


def _pack(*parts: int | str) -> bytes:
    packed = b""
    for part in parts:
        if isinstance(part, str):
            text = part.encode()
            packed += len(text).to_bytes(8, "little") + text
        else:
            packed += (int(part) & _64_BITS).to_bytes(8, "little")
    return packed


def _number(packed: bytes) -> int:
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


class Source(Protocol):
    """A generator of the whole process, which any code may draw from without holding it."""

    def seed(self, value: int) -> None:
        """Put it into the state that `value` stands for, caches of half-used draws included."""

    def touched(self, value: int) -> bool:
        """Whether anything has happened to it since `seed(value)`. May spoil the state: seed again before use."""


class Generators:
    """The generators of the process (Python, NumPy, torch, CUDA) and those that some objects hold, set together.

    `set(value)` does `random.seed(value)`, `np.random.seed(value % 2**32)`, `manual_seed(value)` of torch's CPU
    generator and, if CUDA is in use in this process, of every device's. The held generator number k, in the order in
    which `held.search` finds them, is seeded with n = `derive(value, "held", k)`, so that no two of them draw the same
    numbers: by `seed(n)` or `manual_seed(n)` (a `RandomState` n % 2**32); a NumPy bit generator takes the state of a
    new one made with n, but PCG64 the increment of PCG64(0) and the state n + 2**64 * derive(n, "high").
    """

    def __init__(self, held: Collection[object] = (), peeks: bool = False) -> None:
        self.sources: dict[str, Source] = {
            "python": _Python(),
            "numpy": _NumPy(),
            "torch": _Torch(),
            "cuda": _Cuda(),
        }
        self.peeks = peeks  # user code reads or restores random state: it can depend on it without a trace
        self._seeds = tuple(source.seed for source in self.sources.values())
        self._held = tuple(_seeder(generator) for generator in held)

    @classmethod
    def of(cls, *objects: object) -> Generators:
        """With the generators that these objects can reach; nothing of theirs is called."""
        found = search(*objects)
        return cls(found.generators, found.peeks)

    @property
    def held(self) -> bool:
        return bool(self._held)

    @property
    def count(self) -> int:
        """How many generators are held."""
        return len(self._held)

    def set(self, value: int) -> None:
        for seed in self._seeds:
            seed(value)
        if self._held:
            self.set_held(value)

    def set_held(self, value: int) -> None:
        for number, seed in enumerate(self._held):
            seed(derive(value, "held", number))

    def untouched(self, value: int) -> bool:
        """Whether the process's generators are still exactly as `set(value)` left them.

        Each is asked for one number, which a fresh generator in the same state must give too; a chance agreement has
        odds below 2**-52. Afterwards the state is spoiled: `set` again before anything draws from it.
        """
        return not self.touched(value, self.sources)

    def touched(self, value: int, names: Iterable[str]) -> tuple[str, ...]:
        """Which of these sources are no longer as `set(value)` left them; spoils them like `untouched`."""
        return tuple(name for name in names if self.sources[name].touched(value))


class _Canary:
    """The first number after seeding with some value, worked out once for the value last asked about."""

    def __init__(self, first: Callable[[int], Any]) -> None:
        self._first = first
        self._value: int | None = None
        self._number: Any = None

    def of(self, value: int) -> Any:
        if value != self._value:
            self._number, self._value = self._first(value), value
        return self._number


class _Python:
    def __init__(self) -> None:
        self.seed: Callable[[int], None] = random.seed
        self._canary = _Canary(lambda value: random.Random(value).random())

    def touched(self, value: int) -> bool:
        return bool(random.random() != self._canary.of(value))


class _NumPy:
    def __init__(self) -> None:
        import numpy.random as module

        self._seed: Callable[[int], None] = module.seed
        self._draw: Callable[[], float] = module.random
        self._canary = _Canary(lambda value: module.RandomState(value & _32_BITS).random())

    def seed(self, value: int) -> None:
        self._seed(value & _32_BITS)

    def touched(self, value: int) -> bool:
        return bool(self._draw() != self._canary.of(value))


class _Torch:
    def __init__(self) -> None:
        import torch

        # Straight to the generator: torch.manual_seed also queues calls for every kind of device that there might be.
        self.seed: Callable[[int], Any] = torch.default_generator.manual_seed
        number: Any = torch.zeros((), dtype=torch.int64)
        other = torch.Generator()
        self._draw: Callable[[], Any] = lambda: number.random_().item()
        self._canary = _Canary(lambda value: number.random_(generator=other.manual_seed(value)).item())

    def touched(self, value: int) -> bool:
        return bool(self._draw() != self._canary.of(value))


class _Cuda:
    """All CUDA devices at once; nothing as long as this process has not begun to use CUDA."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda

    def seed(self, value: int) -> None:
        if self._cuda.is_initialized():
            for generator in self._cuda.default_generators:
                generator.manual_seed(value)

    def touched(self, value: int) -> bool:
        if not self._cuda.is_initialized():
            return False
        generators = self._cuda.default_generators
        return any(generator.initial_seed() != value or generator.get_offset() for generator in generators)


def _seeder(generator: Any) -> Callable[[int], Any]:
    """How to put a held generator into the state of a number."""
    import numpy as np
    import torch

    if isinstance(generator, torch.Generator):
        return generator.manual_seed
    if isinstance(generator, random.Random):
        return generator.seed
    if isinstance(generator, np.random.RandomState):
        if generator.get_state(legacy=False)["bit_generator"] == "MT19937":
            return lambda value: generator.seed(value & _32_BITS)
        return partial(_seed_random_state, generator)
    if type(generator) is np.random.PCG64:
        return partial(_seed_pcg64, generator, np.random.PCG64(0).state)
    return partial(_seed_bit_generator, generator)


def _seed_pcg64(bits: np.random.PCG64, template: Any, value: int) -> None:
    """What `default_rng` holds, at a fifth of the cost of seeding: the 128 bits of state are two derived numbers."""
    low_and_high = value | derive(value, "high") << 64
    state: Any = {**template, "state": {"state": low_and_high, "inc": template["state"]["inc"]}}
    bits.state = state


def _seed_random_state(state: np.random.RandomState, value: int) -> None:
    """With another bit generator than the Mersenne twister, which is the only one that its seed() knows."""
    import numpy as np

    # Not by way of the bit generator alone: that would leave a cached normal behind.
    state.set_state(np.random.RandomState(type(state._bit_generator)(value)).get_state(legacy=False))


def _seed_bit_generator(bits: np.random.BitGenerator, value: int) -> None:
    bits.state = type(bits)(value).state
