"""Seeds are a documented function, and setting generators leaves nothing of what was drawn before."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import sysconfig
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.held import search
from echelon.randomness import Generators, derive, init_seed, order_seed, sample_seed, sample_seeds, slice_seed

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(INT64, INT64, st.text())
def test_a_seed_is_the_documented_digest(seed, number, word):
    packed = seed.to_bytes(8, "little", signed=True)
    packed += len(word.encode()).to_bytes(8, "little") + word.encode()
    packed += number.to_bytes(8, "little", signed=True)
    assert derive(seed, word, number) == int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def test_each_purpose_has_a_seed_of_its_own():
    seeds = [init_seed(3), order_seed(3, 0), slice_seed(3, 0, 0), slice_seed(3, 0, 1), slice_seed(3, 1, 0)]
    seeds += [sample_seed(3, 0, 0), sample_seed(3, 0, 1), sample_seed(3, 1, 0), sample_seed(4, 0, 0)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


@given(INT64, st.integers(0, 100), st.lists(st.integers(0, 2**48)))
def test_seeds_of_many_samples_are_those_of_each(seed, epoch, samples):
    assert sample_seeds(seed, epoch, samples) == [sample_seed(seed, epoch, sample) for sample in samples]


def test_deriving_seeds_loads_neither_torch_nor_numpy():
    code = "import sys, echelon.randomness; print({'torch', 'numpy'} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert out.stdout.strip() == "set()"


def draws():
    """One draw of every kind that keeps half of it for the next time, and plain ones."""
    return (
        random.gauss(0, 1), random.random(), np.random.normal(), np.random.random(), np.random.randint(0, 9),
        torch.randn(1).item(), torch.randn(1, dtype=torch.float64).item(), torch.rand(3).tolist(),
        torch.randperm(5).tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("before", range(4))
def test_set_forgets_every_half_used_draw(before):
    generators = Generators()
    generators.set(12)
    expected = draws()
    for _ in range(before):
        random.gauss(0, 1), np.random.normal(), torch.randn(1), torch.randn(1, dtype=torch.float64)
    generators.set(12)
    assert draws() == expected


def test_set_is_what_each_library_calls_that_seed():
    value = derive(1, "anything")
    Generators().set(value)
    ours = draws()
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    assert draws() == ours


DRAWS = {
    "random": random.random,
    "random bits": lambda: random.getrandbits(1),
    "random gauss": lambda: random.gauss(0, 1),
    "random seeded": lambda: random.seed(5),
    "numpy": np.random.rand,
    "numpy small": lambda: np.random.randint(0, 2, dtype=np.uint8),
    "numpy normal": np.random.normal,
    "numpy seeded": lambda: np.random.seed(5),
    "torch": lambda: torch.rand(1),
    "torch normal": lambda: torch.randn(()),
    "torch shuffle": lambda: torch.randperm(3),
    "torch dropout": lambda: torch.nn.functional.dropout(torch.ones(4)),
    "torch seeded": lambda: torch.manual_seed(5),
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("value", [0, 7, 2**64 - 1])
def test_any_draw_is_noticed(kind, value):
    generators = Generators()
    generators.set(value)
    assert generators.untouched(value)
    generators.set(value)
    DRAWS[kind]()
    assert not generators.untouched(value)
    generators.set(value)
    assert generators.untouched(value)


def test_the_source_that_was_drawn_from_is_named():
    generators = Generators()
    generators.set(4)
    np.random.rand()
    assert generators.touched(4, generators.sources) == ("numpy",)


class FakeCudaGenerator:
    def __init__(self):
        self.value, self.offset = 0, 0

    def manual_seed(self, value):
        self.value, self.offset = value, 0

    def initial_seed(self):
        return self.value

    def get_offset(self):
        return self.offset


def test_devices_are_set_once_cuda_is_in_use_and_not_before(monkeypatch):
    devices = (FakeCudaGenerator(), FakeCudaGenerator())
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    generators = Generators()
    generators.set(5)
    assert devices[1].value == 0
    assert generators.untouched(5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not generators.untouched(5), "a device that came into use in between has never been set"
    generators.set(5)
    assert [device.value for device in devices] == [5, 5]
    devices[1].offset = 4
    assert generators.touched(5, generators.sources)[-1] == "cuda"


HELD = {
    "Random": (lambda: random.Random(1), lambda g: (g.gauss(0, 1), g.random())),
    "Generator": (lambda: np.random.default_rng(1), lambda g: (g.integers(9, dtype=np.int32), g.normal())),
    "Generator of MT19937": (lambda: np.random.Generator(np.random.MT19937(1)), lambda g: (g.normal(), g.random())),
    "Philox": (lambda: np.random.Philox(1), lambda g: tuple(g.random_raw(3))),
    "RandomState": (lambda: np.random.RandomState(1), lambda g: (g.normal(), g.random())),
    "RandomState of PCG64": (lambda: np.random.RandomState(np.random.PCG64(1)), lambda g: (g.normal(), g.random())),
    "torch": (torch.Generator, lambda g: (torch.randn((), generator=g).item(), torch.rand(2, generator=g)[1].item())),
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
def test_a_held_generator_is_set_whatever_it_had_drawn(kind):
    make, draw = HELD[kind]
    holder = SimpleNamespace(generator=make())
    generators = Generators.of(holder)
    assert generators.held
    seen = []
    for before in range(4):
        generators.set(3)
        seen.append(draw(holder.generator))
        for _ in range(before):
            draw(holder.generator)
    assert len(set(seen)) == 1
    generators.set(4)
    assert draw(holder.generator) != seen[0]


def test_held_generators_of_one_kind_do_not_draw_the_same_numbers():
    pair = [random.Random(0), random.Random(0), np.random.default_rng(0), np.random.default_rng(0)]
    Generators.of(pair).set(9)
    assert len({pair[0].random(), pair[1].random(), random.random()}) == 3
    assert pair[2].random() != pair[3].random()


def test_the_generators_of_the_process_count_as_its_own_however_they_are_held():
    holder = [
        torch.default_generator,
        np.random.mtrand._rand,
        random.random,
        np.random.rand,
        random.seed,
        np.random.seed,
    ]
    assert search(holder).generators == ()


RNG = random.Random(7)
SETTINGS = SimpleNamespace(inner={"list": [(np.random.default_rng(1),)]})


class Slotted:
    __slots__ = ("generator", "unset")

    def __init__(self):
        self.generator = random.Random(2)


class OfItsClass:
    generator = random.Random(3)


class ByGlobal:
    def __getitem__(self, index):
        return RNG.random()


class ThroughFunctions:
    def __getitem__(self, index):
        return [self.other(i) for i in range(index)]

    def other(self, index):
        return another(index)


def another(index):
    return (lambda: SETTINGS)()


def by_default(index, generator=random.Random(4), *, other=random.Random(5)):  # noqa: B008
    return generator


def closed(generator):
    return lambda: generator


class Module(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.deep = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(Leaf(generator)))


class Leaf(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


class Cautious:
    """Whatever is asked of it, it minds."""

    def __init__(self):
        object.__setattr__(self, "kept", random.Random(6))

    def __getattribute__(self, name):
        raise AssertionError(name)

    def __getattr__(self, name):
        raise AssertionError(name)

    @property
    def danger(self):
        raise AssertionError


PLACES = {
    "slots": (Slotted, 1),
    "class": (OfItsClass, 1),
    "global": (ByGlobal, 1),
    "function of a function": (ThroughFunctions, 1),
    "defaults": (lambda: by_default, 2),
    "closure": (lambda: closed(random.Random(1)), 1),
    "partial": (lambda: functools.partial(print, [random.Random(1)], end=random.Random(2)), 2),
    "bound methods": (
        lambda: [random.Random(1).random, np.random.default_rng(1).normal, np.random.RandomState().rand],
        3,
    ),
    "wrapped": (lambda: functools.wraps(by_default)(lambda: None), 2),
    "module": (lambda: Module(torch.Generator()), 1),
    "shared": (lambda: [RNG, {"again": RNG}], 1),
    "datasets in datasets": (
        lambda: torch.utils.data.ConcatDataset([torch.utils.data.Subset([random.Random(1)], [0]), [random.Random(2)]]),
        2,
    ),
    "no attribute access": (Cautious, 1),
    "system": (random.SystemRandom, 0),
}


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_wherever_they_are_held(place):
    make, count = PLACES[place]
    assert len(search(make()).generators) == count


def test_a_circle_or_a_million_items_end_the_search():
    circle: list = [list(range(10**6)), {}]
    circle.append(circle)
    circle[1]["up"] = circle
    circle.append(random.Random(1))
    assert len(search(circle).generators) == 1


LIBRARY = """
def inner():
    return generator

def outer():
    return inner()
"""


def test_a_librarys_code_is_read_when_user_code_leads_to_it_even_if_the_library_led_there_first():
    names = {"generator": random.Random(1)}
    exec(compile(LIBRARY, f"{sysconfig.get_paths()['purelib']}/made_up.py", "exec"), names)
    assert len(search(names["outer"]).generators) == 0
    assert len(search(names["outer"], [[[names["inner"]]]]).generators) == 1


class Forks:
    def __getitem__(self, index):
        with torch.random.fork_rng():
            return torch.rand(1)


class Asks:
    def __getitem__(self, index):
        return np.random.default_rng(torch.initial_seed() + index).random()


quiet = torch.random.fork_rng


class ByAnotherName:
    def __getitem__(self, index):
        with quiet():
            return torch.rand(1)


@pytest.mark.parametrize("kind", [Forks, Asks, ByAnotherName])
def test_code_that_reads_or_restores_random_state_is_noticed(kind):
    assert search([kind()]).peeks


@pytest.mark.parametrize(
    "thing", [torch.nn.Linear(2, 2), torch.utils.data.TensorDataset(torch.ones(2)), ByGlobal(), [1]]
)
def test_ordinary_objects_do_not_peek(thing):
    assert not search(thing).peeks
