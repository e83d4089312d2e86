"""Samples that are a function of (seed, epoch, id), never of what was read before them, beside them or by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from echelon.data.columns import whole_rows
from echelon.data.fingerprint import fingerprint
from echelon.errors import ConfigError
from echelon.randomness import Generators, derive, sample_seeds

_NAMED = 8  # sample ids in a message


class Reader:
    """Reads and collates micro-batches of a map-style dataset.

    Each sample is made under a random state of its own, `sample_seed(seed, epoch, id)`. Setting all of it can cost as
    much as the dataset's own work, so only those generators are set that it has been seen to draw from:

        put the others into a state known as calm
        read the samples, seeding before each what is known to be drawn from
        are the others still exactly calm?  yes: nothing here depends on them
                                            no: those are drawn from; remember it, and read these samples again

    Generators that the dataset holds are set for every sample, and so is everything if its code reads or restores
    random state, since that leaves no trace. Not covered, being no function of a seed: what a sample takes from the
    system's entropy or the clock, and what a dataset changes in itself while it is read. `term` is what the user calls
    the dataset, `use` what it is wanted for.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any] | None = None,
        seed: int = 0,
        *,
        term: str = "data",
        use: str = "train on",
    ) -> None:
        self._length = _length(dataset, term, use)
        self._term = term
        self._dataset = dataset
        self._collate: Callable[[Any], Any] = collate or default_collate
        self._seed = seed
        self._rows = whole_rows(dataset) if self._collate is default_collate else None
        self._read_many: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
        self._calm = derive(seed, "calm")
        self._found = False
        self._watched: tuple[str, ...] = ()
        self._drawn: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self._length

    def read(self, epoch: int, ids: NDArray[np.int64], value: int) -> Any:
        """The collated samples; the random state is then what collating left of `value`, for the model to draw from."""
        assert len(ids), "a micro-batch has at least one sample"
        if not self._found:
            self._find_generators(int(ids[0]))
        if self._rows is not None:
            self._state.set(value)
            return self._rows(ids)
        samples = self._samples(epoch, ids.tolist())
        self._state.set(value)
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"while collating samples {_listed(ids.tolist())} of the dataset")
            raise

    def fingerprint(self) -> str:
        """A hash of the first sample and one from the middle, as they are in the first epoch.

        One that cannot be read counts as such: training says so when it comes to it.
        """
        chosen = sorted({0, self._length // 2})
        found: list[Any] = [self._length]
        for sample in chosen:
            try:
                found.append(self.read(0, np.array([sample]), self._calm))
            except Exception as error:  # noqa: BLE001  whatever the user's code raises
                found.append(type(error).__name__)
        return fingerprint(found)

    def _find_generators(self, sample: int) -> None:
        """Look for generators after one sample has been read for nothing, in the same state in every process.

        What a dataset makes at its first use, a generator or a table of noise, is then there, and the same everywhere.
        """
        if self._rows is not None:
            self._state = Generators()
        else:
            Generators().set(self._calm)
            with suppress(Exception):  # the same read follows, and reports
                self._read_one(sample)
            self._state = Generators.of(self._dataset, self._collate)
            self._own = Generators.of(self._dataset)
            self._watched = () if self._own.peeks else tuple(self._own.sources)
            self._drawn = tuple(self._own.sources) if self._own.peeks else ()
        self._found = True

    def _samples(self, epoch: int, ids: list[int]) -> Any:
        """Ends: every further round has one more source that is known to be drawn from."""
        while True:
            for name in self._watched:
                self._own.sources[name].seed(self._calm)
            try:
                samples = self._read_each(epoch, ids) if self._drawn or self._own.held else self._read_all(epoch, ids)
            except Exception:
                if not self._notice_draws():
                    raise
                continue
            if not self._notice_draws():
                return samples

    def _notice_draws(self) -> bool:
        touched = self._own.touched(self._calm, self._watched)
        self._drawn = (*self._drawn, *touched)
        self._watched = tuple(name for name in self._watched if name not in touched)
        return bool(touched)

    def _read_all(self, epoch: int, ids: list[int]) -> Any:
        if self._read_many is None:
            return self._read_each(epoch, ids)
        try:
            return self._read_many(ids)
        except Exception:  # noqa: BLE001 - it does not say which sample; reading them one by one does
            return self._read_each(epoch, ids)

    def _read_each(self, epoch: int, ids: list[int]) -> list[Any]:
        seeds = [self._own.sources[name].seed for name in self._drawn]
        held = self._own.held
        values = sample_seeds(self._seed, epoch, ids) if seeds or held else ids
        samples = []
        try:
            for sample, value in zip(ids, values, strict=True):
                for seed in seeds:
                    seed(value)
                if held:
                    self._own.set_held(value)
                samples.append(self._read_one(sample))
        except Exception as error:
            error.add_note(f"while reading sample {ids[len(samples)]} of the dataset")
            raise
        return samples

    def _read_one(self, sample: int) -> Any:
        if self._read_many is None:
            return self._dataset[sample]
        samples = self._read_many([sample])
        if not isinstance(samples, Sequence) or len(samples) != 1:
            why = f"__getitems__ of one id returned {type(samples).__name__}, not a list of one sample"
            raise ConfigError(self._term, f"{why}; samples that are random need to be made one by one")
        return samples[0]


def _length(dataset: Any, term: str, use: str) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        why = (
            f"{kind} has samples only in sequence; a map-style dataset is needed, with __getitem__(index) and __len__()"
        )
        raise ConfigError(term, why)
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        why = f"{kind} has no length ({error}); a map-style dataset is needed, with __getitem__(index) and __len__()"
        raise ConfigError(term, why) from error
    if length == 0:
        raise ConfigError(term, f"{kind} is empty; there is nothing to {use}")
    return length


def _listed(ids: list[int]) -> str:
    shown = ", ".join(str(sample) for sample in ids[:_NAMED])
    return shown if len(ids) <= _NAMED else f"{shown}, ... ({len(ids)} in all)"
