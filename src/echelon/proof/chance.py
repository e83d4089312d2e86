"""Random state by the documented rule, for the reference: every generator put into the state of a number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from echelon.held import search
from echelon.proof.rules import derive

_32_BITS = 2**32


class Chance:
    """The generators of the process, and those that some objects hold in the order in which they are found."""

    def __init__(self, *holders: object) -> None:
        found = search(*holders) if holders else None
        self._held: Sequence[Any] = found.generators if found else ()
        self.can_draw = found is not None and (bool(found.generators) or found.peeks)

    def set(self, value: int) -> None:
        random.seed(value)
        np.random.seed(value % _32_BITS)  # noqa: NPY002  the global one is what user code draws from
        torch.manual_seed(value)
        self.set_held(value)

    def set_held(self, value: int) -> None:
        for number, generator in enumerate(self._held):
            _seed(generator, derive(value, "held", number))


def state() -> tuple[object, ...]:
    """All of the process's random state; equal if nothing was drawn in between."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy_state = (legacy["state"]["key"].tobytes(), legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"])
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    cuda = tuple(torch.cuda.get_rng_state(device).numpy().tobytes() for device in devices)
    return random.getstate(), numpy_state, torch.get_rng_state().numpy().tobytes(), cuda


def _seed(generator: Any, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, random.Random):
        generator.seed(value)
    elif isinstance(generator, np.random.RandomState):
        kind = type(generator._bit_generator)
        seeded = value % _32_BITS if kind is np.random.MT19937 else kind(value)
        generator.set_state(np.random.RandomState(seeded).get_state(legacy=False))
    elif type(generator) is np.random.PCG64:
        fresh: Any = np.random.PCG64(0).state
        fresh["state"]["state"] = value + (derive(value, "high") << 64)
        generator.state = fresh
    else:
        generator.state = type(generator)(value).state
