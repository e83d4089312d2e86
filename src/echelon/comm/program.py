"""What one rank does in a collective: its sends and receives, what each must wait for, and in which form sums travel.

An action may run up to where those it waits for have come, element by element: that is how a long collective becomes a
pipeline without anybody planning one. A send waits for what earlier phases put into its piece; a receive waits for the
receive before it in the same piece, so that sums have one order, and for sends that still need what it overwrites.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from echelon.comm.collectives import Shape, moves_of
from echelon.comm.topology import Moves


class Form(IntEnum):
    """What a piece holds while it is summed. Half precision travels wide while it is `PARTIAL`."""

    OWN = 0  # one rank's contribution, as it was given
    PARTIAL = 1  # the sum of some
    TOTAL = 2  # the sum of all, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One side of a move. `after` are positions in the program; `first`: it is the first to add to its piece here;
    `completes`: with it the piece holds the total.
    """

    move: int
    peer: int
    piece: int
    sends: bool
    adds: bool
    form: Form
    first: bool
    completes: bool
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`receives[move]` is the position of the action that takes that move's bytes; `summed` are the pieces that
    are added to here.
    """

    actions: tuple[Action, ...]
    receives: dict[int, int]
    summed: frozenset[int]


@lru_cache(maxsize=512)
def forms_of(shape: Shape) -> tuple[tuple[Form, bool], ...]:
    """For every move: the form its piece travels in, and whether the receiver's piece is complete with it.

    Found by following whose contribution is in which piece.
    """
    moves = moves_of(shape)
    held: dict[tuple[int, int], frozenset[int]] = {}

    def contributions(rank: int, piece: int) -> frozenset[int]:
        return held.get((rank, piece), frozenset((rank,)))

    found: list[tuple[Form, bool]] = []
    position = 0
    while position < len(moves):
        phase = moves[position].phase
        now = [move for move in moves[position:] if move.phase == phase]
        position += len(now)
        taken = [contributions(move.src, move.take) for move in now]
        for move, brought in zip(now, taken, strict=True):
            before = contributions(move.dst, move.put)
            after = before | brought if move.add else brought
            assert not (move.add and before & brought), "a contribution would be added twice"
            held[move.dst, move.put] = after
            is_total = len(after) == shape.ranks
            found.append((_form(len(brought), shape.ranks), move.add and is_total))
    return tuple(found)


def _form(contributions: int, ranks: int) -> Form:
    if contributions == 1:
        return Form.OWN
    return Form.TOTAL if contributions == ranks else Form.PARTIAL


@lru_cache(maxsize=1024)
def program_of(shape: Shape, rank: int) -> Program:
    """The part of rank `rank`, in an order in which every action comes after those it waits for... and may be run."""
    moves, forms = moves_of(shape), forms_of(shape)
    mine = [
        (i, sends)
        for i, move in enumerate(moves)
        for sends in (True, False)
        if rank == (move.src if sends else move.dst)
    ]
    waits = _waits(moves, mine)
    actions = []
    for (index, sends), after in zip(mine, waits, strict=True):
        move, (form, completes) = moves[index], forms[index]
        actions.append(
            Action(
                move=index,
                peer=move.dst if sends else move.src,
                piece=move.take if sends else move.put,
                sends=sends,
                adds=move.add,
                form=form,
                first=not any(not mine[other][1] for other in after),
                completes=completes and not sends,
                after=after,
            )
        )
    receives = {action.move: place for place, action in enumerate(actions) if not action.sends}
    summed = frozenset(action.piece for action in actions if action.adds and not action.sends)
    return Program(actions=tuple(actions), receives=receives, summed=summed)


def _waits(moves: Moves, mine: list[tuple[int, bool]]) -> list[tuple[int, ...]]:
    """For each of this rank's actions, the places of those it must not overtake."""
    by_piece: dict[int, list[int]] = defaultdict(list)
    for place, (index, sends) in enumerate(mine):
        by_piece[moves[index].take if sends else moves[index].put].append(place)
    waits: list[tuple[int, ...]] = [()] * len(mine)
    for places in by_piece.values():
        for place in places:
            index, sends = mine[place]
            phase = moves[index].phase
            others = [(other, mine[other]) for other in places if other != place]
            if sends:
                earlier = [o for o, (i, s) in others if not s and moves[i].phase < phase]
                waits[place] = tuple(earlier[-1:])
            else:
                earlier = [o for o, (i, s) in others if not s and o < place]
                readers = [o for o, (i, s) in others if s and moves[i].phase <= phase]
                waits[place] = (*earlier[-1:], *readers)
    return waits
