"""A step's slices and who computes which: pure functions of the job, never of who happens to be there.

    epoch (size 10, batch 4, slices 2)     | 0 1 2 3 | 4 5 6 7 | 8 9 |    positions in the epoch's order
    step 1 = [0 1][2 3]   step 2 = [4 5][6 7]   step 3 = [8][9]

An epoch's last step is short, never dropped, never mixed with the next epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Positions `start` to `stop` of the epoch's order. `index` is its place in the step; an empty one is legal."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Step `number` (the first is 1). `slices` are all of them; `samples` is how many samples they hold together."""

    number: int
    epoch: int
    samples: int
    slices: tuple[Slice, ...]


def cut(start: int, stop: int, pieces: int) -> tuple[Slice, ...]:
    """Cut a range of positions into contiguous slices whose lengths differ by at most one."""
    count = stop - start
    edges = [start + count * piece // pieces for piece in range(pieces + 1)]
    return tuple(Slice(index=i, start=edges[i], stop=edges[i + 1]) for i in range(pieces))


@dataclass(frozen=True, kw_only=True)
class Course:
    """Every step of a job, by number: which epoch, which positions, which slices."""

    size: int
    batch: int
    slices: int
    steps: int | None = None
    epochs: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.size // self.batch)

    @property
    def total(self) -> int:
        """How many steps the job has."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 0) * self.steps_per_epoch

    @property
    def smallest_slice(self) -> int:
        """How few samples a slice may have (empty ones are not computed)."""
        steps = {min(self.batch, self.size), self.size % self.batch or self.batch}
        return min(max(1, samples // self.slices) for samples in steps)

    def step(self, number: int) -> Step:
        epoch, index = divmod(number - 1, self.steps_per_epoch)
        start = index * self.batch
        stop = min(start + self.batch, self.size)
        return Step(number=number, epoch=epoch, samples=stop - start, slices=cut(start, stop, self.slices))

    def samples_before(self, number: int) -> int:
        """Samples consumed by all steps before step `number`."""
        epoch, index = divmod(number - 1, self.steps_per_epoch)
        return epoch * self.size + min(index * self.batch, self.size)


def assign(slices: int, weights: Sequence[float]) -> tuple[range, ...]:
    """Contiguous slice numbers for every worker, in proportion to its weight (largest remainder, ties to the lower
    rank).

    A worker may get none. Contiguous, because neighbours can be merged into one larger micro-batch.
    """
    total = sum(weights)
    if not weights or total <= 0 or min(weights) < 0:
        raise ConfigError("weights", f"shares need weights of at least 0 with a positive sum; got {list(weights)}")
    ideal = [slices * weight / total for weight in weights]
    counts = [int(share) for share in ideal]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (counts[rank] - ideal[rank], rank))
    for rank in by_remainder[: slices - sum(counts)]:
        counts[rank] += 1
    shares, start = [], 0
    for count in counts:
        shares.append(range(start, start + count))
        start += count
    return tuple(shares)
