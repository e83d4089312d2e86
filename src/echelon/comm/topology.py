"""Topologies as plain data: who sends which piece to whom, in which phase, and whether it is added there.

A collective's buffer is cut into pieces. A move reads its piece as it was when its phase began, and what moves of one
phase add to a piece is added in the order of the list, so that the result does not depend on who was faster. All-reduce
on three ranks, as a ring:

    phase 0   0 -c-> 1   1 -a-> 2   2 -b-> 0     added there
    phase 1   0 -b-> 1   1 -c-> 2   2 -a-> 0     added: 0 holds the sum of a, 1 of b, 2 of c
    phase 2   0 -a-> 1   1 -b-> 2   2 -c-> 0     copied
    phase 3   0 -c-> 1   1 -a-> 2   2 -b-> 0     copied: everybody holds everything

Nothing here knows of bytes, sockets or tensors; `program` turns the moves into what one rank does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

Hosts = Sequence[Sequence[int]]
"""The ranks of each host, in ascending order; the first of a host speaks for it to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Rank `src` sends its piece `take`; rank `dst` adds it to its piece `put`, or puts it there."""

    phase: int
    src: int
    dst: int
    take: int
    put: int
    add: bool = False


Moves = tuple[Move, ...]


def one_after_another(*parts: Iterable[Move]) -> Moves:
    """Moves whose phases follow on those of the part before."""
    moves: list[Move] = []
    first = 0
    for part in parts:
        shifted = [replace(move, phase=move.phase + first) for move in part]
        moves += shifted
        first = max((move.phase for move in shifted), default=first - 1) + 1
    return tuple(moves)


def _send(phase: int, src: int, dst: int, pieces: Iterable[int], *, add: bool = False) -> Iterator[Move]:
    for piece in pieces:
        yield Move(phase=phase, src=src, dst=dst, take=piece, put=piece, add=add)


# Everybody with everybody. Every byte crosses one link once, which is the least there is, and each piece is summed
# by one rank in one go, so that half precision is rounded once at no cost in bytes.


def direct_reduce_scatter(owners: Sequence[Sequence[int]], ranks: Sequence[int]) -> Moves:
    """`ranks[i]` ends with the sum of the pieces `owners[i]`."""
    n = len(ranks)
    return tuple(
        move
        for distance in range(1, n)
        for place in range(n)
        for move in _send(0, ranks[(place + distance) % n], ranks[place], owners[place], add=True)
    )


def direct_all_gather(owners: Sequence[Sequence[int]], ranks: Sequence[int]) -> Moves:
    """`ranks[i]` begins with the pieces `owners[i]`; all end with all of them."""
    n = len(ranks)
    return tuple(
        move
        for distance in range(1, n)
        for place in range(n)
        for move in _send(0, ranks[place], ranks[(place - distance) % n], owners[place])
    )


def exchange() -> Moves:
    """Two ranks give each other everything at once: the bytes of the others, half the waiting, twice the adding."""
    return (*_send(0, 0, 1, [0], add=True), *_send(0, 1, 0, [0], add=True))


# A ring: only neighbours talk, however many ranks there are (Patarasuk and Yuan, 2009).


def ring_reduce_scatter(ranks: int) -> Moves:
    return tuple(
        move
        for phase in range(ranks - 1)
        for rank in range(ranks)
        for move in _send(phase, rank, (rank + 1) % ranks, [(rank - phase - 1) % ranks], add=True)
    )


def ring_all_gather(ranks: int) -> Moves:
    return tuple(
        move
        for phase in range(ranks - 1)
        for rank in range(ranks)
        for move in _send(phase, rank, (rank + 1) % ranks, [(rank - phase) % ranks])
    )


def chain_broadcast(ranks: int, root: int, pieces: Sequence[int]) -> Moves:
    """From neighbour to neighbour. Cut into segments, the last one begins soon after the first."""
    order = [(root + step) % ranks for step in range(ranks)]
    return tuple(m for phase in range(ranks - 1) for m in _send(phase, order[phase], order[phase + 1], pieces))


# A tree: halving, then doubling (Thakur, Rabenseifner and Gropp, 2005). Ranks beyond the largest power of two hand
# what they have to a partner first and get the result from it at the end.


def _halves(ranks: int) -> list[int]:
    """Distances of partners, the farthest first: 4, 2, 1 for 8 to 15 ranks."""
    distances = []
    size = 1
    while size * 2 <= ranks:
        distances.append(size)
        size *= 2
    return distances[::-1]


def _fold(ranks: int) -> tuple[int, list[list[int]]]:
    """The largest power of two, and for each rank below it the pieces that it answers for: its own and its guest's."""
    inner = 1 << (ranks.bit_length() - 1)
    return inner, [[rank] + ([rank + inner] if rank + inner < ranks else []) for rank in range(inner)]


def _halving(ranks: int) -> list[Move]:
    inner, owned = _fold(ranks)
    moves: list[Move] = []
    for phase, distance in enumerate(_halves(ranks)):
        for rank in range(inner):
            other = rank ^ distance
            # What `other` and those it will still speak to answer for: ranks like it in all bits from here up.
            far = [piece for r in range(inner) if r // distance == other // distance for piece in owned[r]]
            moves += _send(phase, rank, other, sorted(far), add=True)
    return moves


def _doubling(ranks: int) -> list[Move]:
    inner, owned = _fold(ranks)
    moves: list[Move] = []
    for phase, distance in enumerate(reversed(_halves(ranks))):
        for rank in range(inner):
            mine = [piece for r in range(inner) if r // distance == rank // distance for piece in owned[r]]
            moves += _send(phase, rank, rank ^ distance, sorted(mine))
    return moves


def _guests(ranks: int) -> Iterator[tuple[int, int]]:
    """Ranks beyond the power of two, and their partners."""
    inner, _ = _fold(ranks)
    return ((guest, guest - inner) for guest in range(inner, ranks))


def tree_reduce_scatter(ranks: int) -> Moves:
    fold = [m for guest, host in _guests(ranks) for m in _send(0, guest, host, range(ranks), add=True)]
    unfold = [m for guest, host in _guests(ranks) for m in _send(0, host, guest, [guest])]
    return one_after_another(fold, _halving(ranks), unfold)


def tree_all_gather(ranks: int) -> Moves:
    fold = [m for guest, host in _guests(ranks) for m in _send(0, guest, host, [guest])]
    unfold = [
        m for guest, host in _guests(ranks) for m in _send(0, host, guest, [p for p in range(ranks) if p != guest])
    ]
    return one_after_another(fold, _doubling(ranks), unfold)


def tree_all_reduce(ranks: int) -> Moves:
    """One and then the other, but that a guest's piece does not travel to it and back in between."""
    fold = [m for guest, host in _guests(ranks) for m in _send(0, guest, host, range(ranks), add=True)]
    unfold = [m for guest, host in _guests(ranks) for m in _send(0, host, guest, range(ranks))]
    return one_after_another(fold, _halving(ranks), _doubling(ranks), unfold)


def tree_broadcast(ranks: int, root: int, pieces: Sequence[int]) -> Moves:
    """The one-to-many of a switched network: in each phase whoever has it gives it to one who has not."""
    moves: list[Move] = []
    have = 1
    for phase in count():
        if have >= ranks:
            return tuple(moves)
        for place in range(min(have, ranks - have)):
            moves += _send(phase, (root + place) % ranks, (root + place + have) % ranks, pieces)
        have *= 2
    raise AssertionError


# A star: one rank sums and tells. The fewest messages, and the least waiting for small ones.


def star_reduce(members: Sequence[int], root: int, pieces: Sequence[int]) -> Moves:
    return tuple(m for rank in members if rank != root for m in _send(0, rank, root, pieces, add=True))


def star_broadcast(members: Sequence[int], root: int, pieces: Sequence[int]) -> Moves:
    return tuple(m for rank in members if rank != root for m in _send(0, root, rank, pieces))


def backwards(moves: Moves) -> Moves:
    """A broadcast turned round is a reduction: every move the other way, the last phase first, adding."""
    last = max((move.phase for move in moves), default=0)
    turned = [replace(m, phase=last - m.phase, src=m.dst, dst=m.src, add=True) for m in moves]
    return tuple(sorted(turned, key=lambda move: move.phase))


# Hierarchical: inside a host first, one rank of each host between them.


def leaders(hosts: Hosts) -> list[int]:
    return [ranks[0] for ranks in hosts]


def hier_reduce_inside(hosts: Hosts, pieces: Sequence[int]) -> Moves:
    return tuple(m for ranks in hosts for m in star_reduce(ranks, ranks[0], pieces))


def hier_broadcast_inside(hosts: Hosts, pieces: Sequence[int]) -> Moves:
    return tuple(m for ranks in hosts for m in star_broadcast(ranks, ranks[0], pieces))


def hier_scatter_inside(hosts: Hosts) -> Moves:
    """Each rank gets its piece from the one that speaks for its host."""
    return tuple(m for ranks in hosts for rank in ranks[1:] for m in _send(0, ranks[0], rank, [rank]))


def hier_gather_inside(hosts: Hosts) -> Moves:
    return tuple(m for ranks in hosts for rank in ranks[1:] for m in _send(0, rank, ranks[0], [rank]))


def hier_share_inside(hosts: Hosts) -> Moves:
    """Each rank gets every piece but its own from the one that speaks for its host."""
    everything = sorted(rank for ranks in hosts for rank in ranks)
    return tuple(
        m
        for ranks in hosts
        for rank in ranks[1:]
        for m in _send(0, ranks[0], rank, [piece for piece in everything if piece != rank])
    )
