"""What a call moves between which ranks, before it runs: bytes and messages, from the moves and nothing else.

    predict("all_reduce", hosts=((0, 1, 2, 3),), numel=1_000_000, topology="ring")

The meter (traffic.py) counts the same while it runs, and the two agree exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.comm.choose import choose_topology, cut
from echelon.comm.collectives import HostsKey, Shape, moves_of, pieces_of
from echelon.comm.frame import EAGER_BYTES, FRAME_BYTES
from echelon.comm.program import Form, forms_of
from echelon.comm.topology import Move

WIDE_BYTES = 4
"""What an element of a partial sum of half precision takes."""
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One move with its bytes. `messages` are the frames it is cut into; an empty one is a frame, too."""

    move: Move
    transport: str
    size_bytes: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one rank sends to another."""

    transport: str
    size_bytes: int = 0
    messages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """All transfers of a call, by phase."""

    shape: Shape
    transfers: tuple[Transfer, ...]

    def between(self) -> dict[tuple[int, int], Load]:
        """By sender and receiver."""
        loads: dict[tuple[int, int], Load] = {}
        for transfer in self.transfers:
            pair = transfer.move.src, transfer.move.dst
            load = loads.get(pair, Load(transport=transfer.transport))
            loads[pair] = Load(
                transport=load.transport,
                size_bytes=load.size_bytes + transfer.size_bytes,
                messages=load.messages + transfer.messages,
            )
        return loads

    def sent_by(self, rank: int) -> dict[int, Load]:
        """By receiver."""
        return {dst: load for (src, dst), load in self.between().items() if src == rank}

    def size_bytes(self, rank: int | None = None) -> int:
        """What one rank sends, or all of them."""
        return sum(t.size_bytes for t in self.transfers if rank is None or t.move.src == rank)


def predict(
    kind: str,
    *,
    hosts: HostsKey,
    numel: int | Sequence[int],
    itemsize: int = 4,
    half: bool = False,
    topology: str | None = None,
    root: int = 0,
    near: str = "shm",
) -> Cost:
    """The cost of a collective.

    `numel`: the elements of the tensor that is reduced or broadcast; of what each rank gives (all-gather, gather) or
    gets (reduce-scatter, scatter), one number for all or one a rank; for an all-to-all, what each gives to each other.
    `half`: values of half precision, whose partial sums travel as float32. `topology`: as in `Options`; `near`: what
    links ranks of a host.
    """
    ranks = sum(map(len, hosts))
    size_bytes = numel * itemsize if isinstance(numel, int) else 0  # decides only where there is one number
    shape = Shape(kind=kind, topology=choose_topology(kind, size_bytes, hosts, topology), hosts=hosts, root=root)
    if kind in ("all_reduce", "reduce", "broadcast", "barrier"):
        assert isinstance(numel, int), f"{kind} moves one number of elements"
        pieces = tuple(stop - start for start, stop in cut(numel, pieces_of(shape)))
    else:
        pieces = (numel,) * ranks if isinstance(numel, int) else tuple(numel)
    return _cost(shape, (pieces,), itemsize, half and kind in REDUCING, near)


def predict_all_to_all(
    *, hosts: HostsKey, numel: Sequence[Sequence[int]], itemsize: int = 4, near: str = "shm"
) -> Cost:
    """The cost of an all-to-all in which rank i gives `numel[i][j]` elements to rank j."""
    shape = Shape(kind="all_to_all", topology="direct", hosts=hosts)
    return _cost(shape, tuple(map(tuple, numel)), itemsize, False, near)


@lru_cache(maxsize=256)
def _cost(shape: Shape, pieces: tuple[tuple[int, ...], ...], itemsize: int, half: bool, near: str) -> Cost:
    """`pieces`: the elements of each, on each rank; one row if it is the same on all."""
    host_of = {rank: host for host, ranks in enumerate(shape.hosts) for rank in ranks}
    transfers = []
    for move, (form, _) in zip(moves_of(shape), forms_of(shape), strict=True):
        count = pieces[move.src % len(pieces)][move.take]
        width = WIDE_BYTES if half and form is Form.PARTIAL else itemsize
        is_near = host_of[move.src] == host_of[move.dst]
        transfers.append(
            Transfer(
                move=move,
                transport=near if is_near else "tcp",
                size_bytes=count * width,
                messages=frames(count * width),
            )
        )
    return Cost(shape=shape, transfers=tuple(transfers))


def frames(size_bytes: int) -> int:
    """How many frames carry a move."""
    return max(1, -(-size_bytes // FRAME_BYTES))


def messages_of_send(size_bytes: int) -> int:
    """A message to one rank: a small one is its own announcement, a large one is announced first."""
    return 1 if size_bytes <= EAGER_BYTES else 1 + frames(size_bytes)
