"""A sample is the same whatever was read before it, beside it or by whom; the model's random state is the slice's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, StackDataset, Subset, TensorDataset

from echelon.data.columns import Columns
from echelon.data.reader import Reader
from echelon.errors import ConfigError
from echelon.randomness import sample_seed

SIZE = 24


class Drawn:
    """Samples (id, *numbers) by `draw(id)`, which may use any generator."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, *(float(number) for number in self.draw(index))


class DrawnMany(Drawn):
    def __getitems__(self, ids):
        return [self[index] for index in ids]


def by_hold(make, draw):
    holder = SimpleNamespace(generator=make())
    return Drawn(lambda index: draw(holder.generator))


def forked(index):
    with torch.random.fork_rng(devices=[]):
        return [torch.rand(())]


def restored(index):
    before = random.getstate()
    numbers = [random.random()]
    random.setstate(before)
    return numbers


class Lazy:
    """Makes its generator at the first read."""

    generator = None

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if self.generator is None:
            self.generator = np.random.default_rng()
        return index, self.generator.random()


class LazyTable:
    """Draws a table of noise at the first read."""

    table = None

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if self.table is None:
            self.table = np.random.rand(SIZE)
        return index, self.table[index]


def nested():
    inner = Drawn(lambda index: [torch.rand(()) if index % 5 == 0 else 0])
    held = by_hold(lambda: random.Random(1), lambda g: [g.gauss(0, 1)])
    return ConcatDataset([Subset(inner, range(0, SIZE, 2)), Subset(ConcatDataset([held]), range(12))])


def transforms():
    def flip(index, generator=np.random.RandomState(5)):  # noqa: B008
        return generator.normal()

    chain = [lambda index: random.gauss(0, 1), flip, lambda index: torch.randn(())]
    return Drawn(lambda index: [step(index) for step in chain])


def seeds_itself(index):
    random.seed(index)
    return [random.random(), np.random.rand()]


def rarely(index):
    return [np.random.rand() if index == SIZE - 1 else random.random() if index == 2 else 0]


def by_turns(index):
    draw = (random.random, np.random.rand, lambda: torch.rand(()))[index % 3]
    return [draw() if index > 4 else 0]


DATASETS = {
    "nothing": lambda: Drawn(lambda i: []),
    "python": lambda: Drawn(lambda i: [random.random()]),
    "python gauss": lambda: Drawn(lambda i: [random.gauss(0, 1)]),
    "numpy": lambda: Drawn(lambda i: [np.random.rand(), np.random.randint(9)]),
    "numpy normal": lambda: Drawn(lambda i: [np.random.normal()]),
    "torch": lambda: Drawn(lambda i: [torch.rand(())]),
    "torch normal": lambda: Drawn(lambda i: [torch.randn(()), *torch.randn(3, dtype=torch.float64)]),
    "sometimes": lambda: Drawn(lambda i: [random.random()] if i % 7 == 3 else [0]),
    "once in a while": lambda: Drawn(rarely),
    "one after another": lambda: Drawn(by_turns),
    "seeds itself": lambda: Drawn(seeds_itself),
    "seeds torch": lambda: Drawn(lambda i: [torch.manual_seed(i) and torch.rand(())]),
    "forks": lambda: Drawn(forked),
    "restores": lambda: Drawn(restored),
    "asks for the seed": lambda: Drawn(lambda i: [torch.initial_seed() % 1000]),
    "many": lambda: DrawnMany(lambda i: [random.random(), torch.rand(())]),
    "many sometimes": lambda: DrawnMany(lambda i: [torch.randn(()) if i % 4 == 0 else 0]),
    "many, forks": lambda: DrawnMany(forked),
    "held Random": lambda: by_hold(lambda: random.Random(1), lambda g: [g.gauss(0, 1)]),
    "held Generator": lambda: by_hold(np.random.default_rng, lambda g: [g.integers(9, dtype=np.int32), g.normal()]),
    "held RandomState": lambda: by_hold(lambda: np.random.RandomState(1), lambda g: [g.normal()]),
    "held torch": lambda: by_hold(torch.Generator, lambda g: [torch.randn((), generator=g)]),
    "held and not": lambda: by_hold(lambda: random.Random(1), lambda g: [g.random(), np.random.rand()]),
    "transforms": transforms,
    "nested": nested,
    "stacked": lambda: StackDataset(Drawn(lambda i: [torch.rand(())]), Drawn(lambda i: [random.random()])),
    "lazy": Lazy,
    "lazy table": LazyTable,
}  # fmt: skip


def key(sample):
    return sample[0] if isinstance(sample[0], int) else key(sample[0])


def read(reader, epoch, ids, value=1):
    return reader.read(epoch, np.asarray(ids), value)


def samples_of(kind, groups, disturb=lambda: None, epoch=3):
    """{id: sample}, read in these groups by a reader of its own."""
    reader, out = Reader(DATASETS[kind](), list, 7), {}
    for number, ids in enumerate(groups):
        disturb()
        out.update(zip(ids, read(reader, epoch, ids, number), strict=True))
    return out


def disturb_everything():
    random.gauss(0, 1), np.random.normal(), torch.randn(()), torch.randn((), dtype=torch.float64)


@pytest.mark.parametrize("kind", DATASETS)
def test_a_sample_depends_on_nothing_that_was_read_before_or_beside_it(kind):
    alone = {i: samples_of(kind, [[i]])[i] for i in range(SIZE)}
    assert samples_of(kind, [range(SIZE)]) == alone
    assert samples_of(kind, [range(SIZE - 1, -1, -1)]) == alone
    assert samples_of(kind, [[i] for i in range(SIZE)], disturb_everything) == alone
    shuffler = random.Random(kind)
    for _ in range(5):
        ids = shuffler.sample(range(SIZE), SIZE)
        cuts = sorted(shuffler.sample(range(1, SIZE), 4))
        groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, SIZE], strict=True)]
        assert samples_of(kind, groups, disturb_everything) == alone


@pytest.mark.parametrize("kind", DATASETS)
def test_a_sample_read_again_is_the_same(kind):
    reader = Reader(DATASETS[kind](), list, 7)
    first = read(reader, 3, range(SIZE))
    read(reader, 4, [5, 1, 2])
    disturb_everything()
    assert read(reader, 3, range(SIZE)) == first


ALWAYS_RANDOM = [
    k for k in DATASETS if k in ("python", "numpy", "torch", "forks", "restores", "many", "transforms", "lazy")
]


@pytest.mark.parametrize("kind", [*ALWAYS_RANDOM, *(k for k in DATASETS if k.startswith("held"))])
def test_samples_of_one_read_and_of_two_epochs_are_drawn_apart(kind):
    one = samples_of(kind, [range(SIZE)])
    other = samples_of(kind, [range(SIZE)], epoch=4)
    numbers = [sample[1:] for sample in (*one.values(), *other.values())]
    assert len(set(numbers)) == len(numbers)


def test_a_sample_is_made_under_the_documented_state():
    for ids in ([4], [4, 5, 6], list(range(SIZE))):
        batch = read(Reader(Drawn(lambda i: [random.random(), np.random.rand(), torch.rand(())]), list, 7), 2, ids)
        for sample in batch:
            value = sample_seed(7, 2, sample[0])
            random.seed(value)
            np.random.seed(value % 2**32)
            torch.manual_seed(value)
            assert sample == (sample[0], random.random(), np.random.rand(), torch.rand(()).item())


@pytest.mark.parametrize("dataset", [*DATASETS, "columns"])
def test_the_model_draws_from_the_state_of_its_slice(dataset):
    data = Columns(x=torch.arange(SIZE)) if dataset == "columns" else DATASETS[dataset]()
    reader = Reader(data, None if dataset == "columns" else list, 7)
    for _ in range(3):
        read(reader, 0, [3, 1, 7, 10], 2**63 + 5)
        drawn = random.gauss(0, 1), np.random.normal(), torch.randn(()).item()
        random.seed(2**63 + 5)
        np.random.seed(5)
        torch.manual_seed(2**63 + 5)
        assert drawn == (random.gauss(0, 1), np.random.normal(), torch.randn(()).item())
        disturb_everything()


def test_collating_draws_from_the_state_of_the_slice():
    reader = Reader(Drawn(lambda i: []), lambda samples: (len(samples), torch.rand(()).item()), 7)
    drawn = torch.rand((), generator=torch.Generator().manual_seed(9)).item()
    assert read(reader, 0, [1, 2], 9) == read(reader, 1, [4, 5], 9) == (2, drawn)


class Counted(Drawn):
    def __init__(self, draw):
        super().__init__(draw)
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("draw", "reads"), [(lambda i: [], 1 + 4 * 3), (lambda i: [torch.rand(())], 1 + 4 * 4)])
def test_nothing_is_read_twice_once_it_is_known_who_draws(draw, reads):
    dataset = Counted(draw)
    reader = Reader(dataset, None, 7)
    for epoch in range(3):
        read(reader, epoch, [1, 2, 3, 4])
    assert dataset.reads == reads


def test_a_batch_of_a_dataset_that_does_not_draw_is_asked_for_at_once():
    asked = []

    class Many(Drawn):
        def __getitems__(self, ids):
            asked.append(list(ids))
            return [self[i] for i in ids]

    read(Reader(Many(lambda i: []), list), 0, [5, 2])
    assert asked[-1] == [5, 2]
    assert all(type(i) is int for i in asked[-1])


class Whole:
    """`__getitems__` gives a collated batch."""

    def __init__(self, draws):
        self.draws = draws

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, ids):
        return torch.tensor(ids) + (torch.rand(()) if self.draws else 0)


def test_a_batch_collated_by_the_dataset_is_passed_on_if_nothing_is_drawn():
    assert read(Reader(Whole(draws=False), lambda batch: batch), 0, [5, 2]).tolist() == [5, 2]
    with pytest.raises(ConfigError, match="one by one"):
        read(Reader(Whole(draws=True), lambda batch: batch), 0, [5, 2])


def broken(index):
    if index == 6:
        raise ValueError("bad image")
    return []


@pytest.mark.parametrize("kind", [Drawn, DrawnMany])
@pytest.mark.parametrize("noise", [lambda: None, random.random])
def test_an_error_names_its_sample_and_stays_what_it_is(kind, noise):
    def draw(index):
        noise()
        return broken(index)

    reader = Reader(kind(draw), None, 7)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad image") as caught:
            read(reader, 0, [1, 2, 6, 3])
        assert caught.value.__notes__ == ["while reading sample 6 of the dataset"]
        assert len(read(reader, 0, [1, 2, 3])[0]) == 3


@pytest.mark.parametrize("seed", range(6))
def test_whether_a_sample_fails_depends_on_its_own_state_only(seed):
    def draw(index):
        if random.random() < 0.3:
            raise ValueError(index)
        return []

    def fails(reader, ids):
        try:
            read(reader, 0, ids)
        except ValueError:
            return True
        return False

    alone = [fails(Reader(Drawn(draw), list, seed), [i]) for i in range(SIZE)]
    assert 0 < sum(alone) < SIZE
    for start in range(SIZE - 4):
        assert fails(Reader(Drawn(draw), list, seed), range(start, start + 4)) == any(alone[start : start + 4])


def test_an_error_while_collating_names_the_samples():
    reader = Reader(Drawn(lambda i: [0.0] * (1 + i % 2)))
    with pytest.raises(RuntimeError) as caught:
        read(reader, 0, [1, 2])
    assert caught.value.__notes__ == ["while collating samples 1, 2 of the dataset"]


def test_default_collate_is_the_one_of_torch():
    batch = read(Reader(Drawn(lambda i: [i / 2])), 0, [4, 3])
    assert [(part.dtype, part.tolist()) for part in batch] == [(torch.int64, [4, 3]), (torch.float64, [2.0, 1.5])]
    assert read(Reader(Columns(x=torch.arange(9) * 2)), 0, [4, 3])["x"].tolist() == [8, 6]
    assert read(Reader(Columns(x=torch.arange(9))), 0, [4, 3]).keys() == {"x"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "word"),
    [
        (Stream(), "map-style dataset is needed"),
        (iter([1]), "map-style dataset is needed"),
        ({1, 2}, "map-style dataset is needed"),
        (NoLength(), "no length"),
        ([], "empty"),
        (TensorDataset(torch.zeros(0, 2)), "empty"),
        (Columns(x=torch.zeros(0)), "empty"),
    ],
)
def test_what_is_no_dataset_says_why(dataset, word):
    with pytest.raises(ConfigError, match="data: ") as caught:
        Reader(dataset)
    assert word in caught.value.why


@pytest.mark.parametrize("dataset", [[], NoLength(), Stream()])
def test_a_dataset_is_called_what_the_user_calls_it(dataset):
    with pytest.raises(ConfigError) as caught:
        Reader(dataset, term="evaluate.data", use="evaluate on")
    assert caught.value.term == "evaluate.data"
    assert "train" not in str(caught.value)


def test_plain_sequences_are_datasets():
    assert len(Reader([1.5, 2.5])) == 2
    assert read(Reader([1.5, 2.5]), 0, [1, 0]).tolist() == [2.5, 1.5]
    assert read(Reader(np.arange(5)), 0, [1, 0]).tolist() == [1, 0]
