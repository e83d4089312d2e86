"""Who is late, where a backend cannot ask (gloo, NCCL): a rank that has waited long says in the store for what.

It reads there what the others say:

    rank 0   waits for #41 the gradients' all-reduce      both have said so: fine
    rank 2   waits for #41 the gradients' all-reduce
    rank 1   (nothing, or #40)                            still computing: the one waited for
    rank 3   waits for #41 adding up the bytes sent       elsewhere: it will never come, and all are told

Costs nothing as long as nobody waits long. An entry is made well before its maker looks, so that those who came at the
same moment as it are not taken for late.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from echelon.errors import OutOfStep


class Roll:
    """One rank's entry, and a look at the others'."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def enter(self, number: int, during: str) -> None:
        """Say that this rank waits for operation `number`."""
        self._store.set(self._key(self._rank), json.dumps([number, during]))

    def call(self, number: int, during: str) -> tuple[list[int], bool]:
        """The ranks that have not come to operation `number` yet, and whether this rank is the first that waits.
        Raises `OutOfStep` if another rank waits in another operation in its place.
        """
        late: list[int] = []
        here = [self._rank]
        for rank in range(self._size):
            if rank == self._rank:
                continue
            at, doing = self._entry(rank)
            if at == number and doing != during:
                raise OutOfStep(self._rank, during, rank, doing)
            (here if at >= number else late).append(rank)
        return late, self._rank == min(here)

    def _entry(self, rank: int) -> tuple[int, str]:
        key = self._key(rank)
        if not self._store.check([key]):
            return -1, ""
        at, doing = json.loads(self._store.get(key))
        return int(at), str(doing)

    @staticmethod
    def _key(rank: int) -> str:
        return f"waits/{rank}"
