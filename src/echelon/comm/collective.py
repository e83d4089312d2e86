"""One collective under way on one rank: runs its program over pieces of memory, frame by frame."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from echelon.comm.buffer import Buffer
from echelon.comm.frame import EAGER_BYTES, FRAME_BYTES, Call, Header, Kind
from echelon.comm.operation import Operation
from echelon.comm.program import Action, Program
from echelon.comm.ring import Bytes

if TYPE_CHECKING:
    from echelon.comm.communicator import Communicator


class Collective(Operation):
    """Driven by the fabric, under its lock."""

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        *,
        seq: int,
        call: Call,
        program: Program,
        buffer: Buffer,
        timeout_s: float,
    ) -> None:
        super().__init__(communicator, name, timeout_s, op=name)
        self.seq = seq
        self.call = call
        self.stash: defaultdict[int, deque[tuple[Header, Bytes]]] = defaultdict(deque)
        """Frames set aside, by peer, because it was not their turn."""
        self._program = program
        self._actions = program.actions
        self._buffer = buffer
        self._pieces = buffer.pieces
        n = len(self._actions)
        self._position = [0] * n
        self._finished = [False] * n
        self._sends = [place for place, action in enumerate(self._actions) if action.sends]
        self._left = n
        self._must_grant, self._needs_grant = self._large_peers()

    def _large_peers(self) -> tuple[set[int], set[int]]:
        """Peers that send much to this rank, and peers to whom it sends much."""
        totals: dict[tuple[bool, int], int] = {}
        for action in self._actions:
            side = (action.sends, action.peer)
            totals[side] = totals.get(side, 0) + self._pieces[action.piece].count * self._buffer.itemsize(action)
        self.predicted_bytes = sum(size for (sends, _), size in totals.items() if sends)
        large = [side for side, size in totals.items() if size > EAGER_BYTES]
        return {peer for sends, peer in large if not sends}, {peer for sends, peer in large if sends}

    def start(self) -> None:
        for peer in sorted(self._must_grant):
            self.communicator.control(peer, Header(Kind.READY, self.call, self.communicator.id, self.seq))
        if not self._left:
            self._end()

    def ready(self, peer: int) -> None:
        self._needs_grant.discard(peer)

    def call_with(self, header: Header) -> Call:
        """What a frame of this move must say if its sender called the same."""
        place = self._program.receives.get(header.move)
        if self.call.numel >= 0 or header.kind != Kind.DATA or place is None:
            return self.call
        return self.call._replace(numel=self._pieces[self._actions[place].piece].count)

    # -- sending

    def push(self) -> bool:
        moved = False
        for place in tuple(self._sends):
            moved |= self._push_one(place)
        return moved

    def _limit(self, action: Action, stop: int) -> int:
        for other in action.after:
            if not self._finished[other]:
                stop = min(stop, self._position[other])
        return stop

    def _push_one(self, place: int) -> bool:
        action = self._actions[place]
        if action.peer in self._needs_grant:
            return False
        piece = self._pieces[action.piece]
        limit = self._limit(action, piece.count)
        at, step = self._position[place], FRAME_BYTES // self._buffer.itemsize(action)
        if min(at + step, piece.count) > limit or (not piece.count and self._must_wait(action)):
            return False
        source, item = self._buffer.source(action), self._buffer.itemsize(action)
        call = self.call if self.call.numel >= 0 else self.call._replace(numel=piece.count)
        moved = False
        # Only whole frames, so that how many there are is known before.
        while (upto := min(at + step, piece.count)) <= limit:
            header = Header(Kind.DATA, call, self.communicator.id, self.seq, action.move, 0, at, (upto - at) * item)
            payload = source[at * item : upto * item] if source is not None else None
            if not self.communicator.send(self, action.peer, header, payload):
                break
            moved = True
            at = self._position[place] = upto
            if at >= piece.count:
                self._sends.remove(place)
                self._finish(place)
                break
        return moved

    # -- receiving

    def take(self, header: Header, payload: Bytes) -> bool:
        """Apply a frame if it is its turn."""
        place = self._program.receives[header.move]
        action = self._actions[place]
        piece = self._pieces[action.piece]
        at = header.offset
        upto = at + header.size // self._buffer.itemsize(action)
        assert self._position[place] == at
        assert upto <= piece.count
        if self._limit(action, upto) < upto or (not piece.count and self._must_wait(action)):
            return False
        if header.size:
            self._buffer.put(action, at, upto, payload)
        self._position[place] = upto
        if upto >= piece.count:
            self._finish(place)
        return True

    def _must_wait(self, action: Action) -> bool:
        return any(not self._finished[other] for other in action.after)

    # -- the end

    def _finish(self, place: int) -> None:
        self._finished[place] = True
        self._left -= 1
        if not self._left:
            self._end()

    def _end(self) -> None:
        self.communicator.ended(self)
        self.finish()

    def needed(self) -> set[int]:
        left = (action for place, action in enumerate(self._actions) if not self._finished[place])
        return {self.communicator.members[action.peer] for action in left if not self._is_here(action)}

    def _is_here(self, action: Action) -> bool:
        """Whether all that is to be received has come, if only to be set aside."""
        kept = [header for header, _ in self.stash[action.peer] if header.move == action.move]
        if action.sends or not kept:
            return False
        return kept[-1].offset + kept[-1].size // self._buffer.itemsize(action) >= self._pieces[action.piece].count

    def awaited(self) -> set[int]:
        waiting = set()
        for place, action in enumerate(self._actions):
            can_go = not action.after or self._limit(action, self._pieces[action.piece].count) > self._position[place]
            if can_go and not self._finished[place]:
                waiting.add(self.communicator.members[action.peer])
        return waiting
