"""Each collective as moves, by topology. Pieces are named here: for sums there is one a rank (or a single one), the
pieces of an all-to-all are `j` for what goes to rank j and `ranks + i` for what comes from rank i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.comm import topology as t
from echelon.comm.topology import Move, Moves

TOPOLOGIES = ("direct", "ring", "tree", "star", "hier")
ALL_TOPOLOGIES = (*TOPOLOGIES, "exchange")
"""With what only two ranks can do, and nobody asks for."""
HostsKey = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the moves of a collective depend on. `hosts` are the group's ranks by host; `root` where there is one."""

    kind: str
    topology: str
    hosts: HostsKey
    root: int = 0

    @property
    def ranks(self) -> int:
        return sum(map(len, self.hosts))


def pieces_of(shape: Shape) -> int:
    """Into how many pieces the buffer is cut."""
    if shape.kind in ("all_reduce", "barrier"):
        return 1 if shape.topology in ("star", "exchange") else shape.ranks
    if shape.kind in ("broadcast", "reduce"):
        return 1
    return 2 * shape.ranks if shape.kind == "all_to_all" else shape.ranks


@lru_cache(maxsize=512)
def moves_of(shape: Shape) -> Moves:
    """All moves of a collective, by phase."""
    if shape.ranks == 1:
        return ()
    moves = _MAKERS[shape.kind](shape)
    return tuple(sorted(moves, key=lambda move: move.phase))


def _all_reduce(shape: Shape) -> Moves:
    everyone = range(shape.ranks)
    match shape.topology:
        case "exchange":
            return t.exchange()
        case "star":
            return t.one_after_another(t.star_reduce(everyone, 0, [0]), t.star_broadcast(everyone, 0, [0]))
        case "tree":
            return t.tree_all_reduce(shape.ranks)
        case "hier":
            heads = t.leaders(shape.hosts)
            # Between hosts each leader sums one share of the pieces, whatever host they belong to.
            shares = [[p for p in everyone if p % len(heads) == place] for place in range(len(heads))]
            return t.one_after_another(
                t.hier_reduce_inside(shape.hosts, everyone),
                t.direct_reduce_scatter(shares, heads),
                t.direct_all_gather(shares, heads),
                t.hier_broadcast_inside(shape.hosts, everyone),
            )
    return t.one_after_another(_reduce_scatter(shape), _all_gather(shape))


def _reduce_scatter(shape: Shape) -> Moves:
    n, everyone = shape.ranks, range(shape.ranks)
    match shape.topology:
        case "ring":
            return t.ring_reduce_scatter(n)
        case "tree":
            return t.tree_reduce_scatter(n)
        case "star":
            scatter = [Move(phase=0, src=0, dst=rank, take=rank, put=rank) for rank in range(1, n)]
            return t.one_after_another(t.star_reduce(everyone, 0, everyone), scatter)
        case "hier":
            return t.one_after_another(
                t.hier_reduce_inside(shape.hosts, everyone),
                t.direct_reduce_scatter(shape.hosts, t.leaders(shape.hosts)),
                t.hier_scatter_inside(shape.hosts),
            )
    return t.direct_reduce_scatter([[rank] for rank in everyone], everyone)


def _all_gather(shape: Shape) -> Moves:
    n, everyone = shape.ranks, range(shape.ranks)
    match shape.topology:
        case "ring":
            return t.ring_all_gather(n)
        case "tree":
            return t.tree_all_gather(n)
        case "star":
            gather = [Move(phase=0, src=rank, dst=0, take=rank, put=rank) for rank in range(1, n)]
            spread = [
                Move(phase=0, src=0, dst=rank, take=piece, put=piece)
                for rank in range(1, n)
                for piece in everyone
                if piece != rank
            ]
            return t.one_after_another(gather, spread)
        case "hier":
            return t.one_after_another(
                t.hier_gather_inside(shape.hosts),
                t.direct_all_gather(shape.hosts, t.leaders(shape.hosts)),
                t.hier_share_inside(shape.hosts),
            )
    return t.direct_all_gather([[rank] for rank in everyone], everyone)


def _broadcast(shape: Shape) -> Moves:
    n, root = shape.ranks, shape.root
    match shape.topology:
        case "ring":
            return t.chain_broadcast(n, root, [0])
        case "tree":
            return t.tree_broadcast(n, root, [0])
        case "hier":
            hosts = _led_by(shape.hosts, root)
            return t.one_after_another(
                t.star_broadcast(t.leaders(hosts), root, [0]), t.hier_broadcast_inside(hosts, [0])
            )
    return t.star_broadcast(range(n), root, [0])


def _led_by(hosts: HostsKey, root: int) -> HostsKey:
    """The same hosts; `root` speaks for its own."""
    return tuple((root, *(r for r in ranks if r != root)) if root in ranks else ranks for ranks in hosts)


def _reduce(shape: Shape) -> Moves:
    return t.backwards(_broadcast(shape))


def _gather(shape: Shape) -> Moves:
    root = shape.root
    return tuple(Move(phase=0, src=rank, dst=root, take=rank, put=rank) for rank in range(shape.ranks) if rank != root)


def _scatter(shape: Shape) -> Moves:
    root = shape.root
    return tuple(Move(phase=0, src=root, dst=rank, take=rank, put=rank) for rank in range(shape.ranks) if rank != root)


def _all_to_all(shape: Shape) -> Moves:
    n = shape.ranks
    return tuple(
        Move(phase=0, src=src, dst=(src + distance) % n, take=(src + distance) % n, put=n + src)
        for distance in range(1, n)
        for src in range(n)
    )


_MAKERS = {
    "all_reduce": _all_reduce,
    "barrier": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
