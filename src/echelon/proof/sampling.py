"""Which samples a recorded step read, against which it should have read. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from echelon.proof.rules import Lesson


class Entries(Protocol):
    """The entries of a recorded run."""

    ranks: int

    def entry(self, step: int, rank: int = 0) -> dict[str, Any]: ...


def compare_samples(record: Entries, task: Lesson, first: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sample ids that no worker read although the step has them, and ids read that it has not, or has less often."""
    read: Counter[int] = Counter()
    for rank in range(record.ranks):
        entry = record.entry(task.number, rank) if rank else first
        start, stop = first["shares"][rank]
        expected = sum(len(piece.ids) for piece in task.pieces[start:stop])
        read.update(last_attempt([i for ids in entry["samples"] for i in ids], expected))
    should = Counter(i for piece in task.pieces for i in piece.ids)
    return tuple(sorted((should - read).elements())), tuple(sorted((read - should).elements()))


def last_attempt(ids: list[int], expected: int) -> list[int]:
    """A step that is computed again (exact mode looks for its grid) reads all its samples again, in the same order."""
    for attempts in range(len(ids), 1, -1):
        length, rest = divmod(len(ids), attempts)
        if not rest and length and ids == ids[:length] * attempts and length >= expected:
            return ids[:length]
    return ids
