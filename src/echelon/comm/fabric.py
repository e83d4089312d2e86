"""The fabric: every link of this process, and everything under way on them. It never waits; see drive.py for who does.

a link has a frame -> its communicator -> the operation it belongs to
an operation has something to send -> its link, while there is room
"""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress

from echelon.comm.communicator import Communicator, abort_frame, given_up_by
from echelon.comm.frame import Header, Kind
from echelon.comm.link import Link
from echelon.comm.operation import Operation
from echelon.comm.ring import Bytes
from echelon.comm.traffic import Snapshot, Traffic
from echelon.errors import Bug


class Fabric:
    """Links to the other ranks, by rank; `names` are the ranks as users know them. All of it under `lock`."""

    def __init__(self, rank: int, names: Sequence[int], links: dict[int, Link]) -> None:
        self.rank = rank
        self.links = links
        self.lock = threading.RLock()
        self.traffic = Traffic()
        self.operations: list[Operation] = []
        self.ended: deque[Operation] = deque()
        """Operations whose end is still to be told."""
        self._names = names
        self._buried: set[int] = set()
        self._communicators: dict[int, Communicator] = {}
        self._made: Counter[int] = Counter()
        self._gone: set[int] = set()
        self._homeless: dict[int, list[tuple[int, Header, Bytes]]] = {}
        self._outbox: dict[int, deque[tuple[Header, Bytes | None]]] = {peer: deque() for peer in links}

    def name_of(self, member: int) -> int:
        return self._names[member]

    def measure(self) -> Snapshot:
        """What was sent up to now, by all groups together."""
        with self.lock:
            return self.traffic.snapshot()

    def ident(self, name: str, members: Sequence[int]) -> int:
        """A group's number on every member. One that is made again, by the same name, has another."""
        with self.lock:
            key = _hash(f"{name}/{list(members)}")
            self._made[key] += 1
            return _hash(f"{key}/{self._made[key]}")

    def add(self, communicator: Communicator) -> None:
        """From now on frames of this group find it; those that came before it was made, too."""
        with self.lock:
            self._communicators[communicator.id] = communicator
            for peer, header, payload in self._homeless.pop(communicator.id, []):
                communicator.arrived(peer, header, payload, keep=True)

    def remove(self, communicator: Communicator) -> bool:
        """Forget a group; whether it was the last."""
        with self.lock:
            if self._communicators.pop(communicator.id, None) is not None:
                self._gone.add(communicator.id)
            return not self._communicators

    def send(self, peer: int, header: Header, payload: Bytes | None) -> bool:
        """Hand a frame to a link, unless others are before it, there is no room, or nobody is there to read it."""
        link = self.links[peer]
        return not link.lost and not self._outbox[peer] and link.push(header, payload)

    def control(self, peer: int, header: Header, payload: Bytes | None = None) -> None:
        """A frame that must go, now or when there is room."""
        self._outbox[peer].append((header, payload))
        self._flush(peer)

    def _flush(self, peer: int) -> bool:
        outbox, link = self._outbox[peer], self.links[peer]
        if link.lost:
            outbox.clear()
        moved = False
        while outbox and link.push(*outbox[0]):
            outbox.popleft()
            moved = True
        return moved

    def round(self) -> bool:
        """Take what has come, send what can be sent; whether anything moved."""
        moved = False
        for peer, link in self.links.items():
            moved |= self._receive(peer, link, keep=False)
        for communicator in self._communicators.values():
            moved |= communicator.take_kept()
        for operation in self.operations:
            if not operation.done:
                moved |= operation.push()
        for peer, outbox in self._outbox.items():
            self.links[peer].flush()
            if outbox:
                moved |= self._flush(peer)
        self.sort_out()
        return moved

    def _receive(self, peer: int, link: Link, *, keep: bool) -> bool:
        moved = False
        while (found := link.peek()) is not None:
            header, payload = found
            communicator = self._communicators.get(header.group)
            if header.group in self._gone:
                self._say_gone(peer, header)
            elif communicator is None:
                self._homeless.setdefault(header.group, []).append((peer, header, payload.copy()))
            elif not communicator.arrived(peer, header, payload, keep=keep):
                break
            link.pop()
            moved = True
        return moved

    def _say_gone(self, peer: int, header: Header) -> None:
        """A frame of a group that was given up here. One that waits for this rank, or that it has not waited for, means
        that its sender's call cannot end; others were sent before their sender knew.
        """
        if header.kind == Kind.DATA or (header.kind == Kind.OFFER and header.size < header.offset):
            self.control(peer, *abort_frame(header.group, given_up_by(self.name_of(self.rank))))

    def make_way(self) -> bool:
        """Nothing moves: set frames aside whose turn has not come, so that those behind them can pass."""
        moved = False
        for peer, link in self.links.items():
            moved |= self._receive(peer, link, keep=True)
        return moved

    def sort_out(self) -> None:
        """Part what has ended from what is under way."""
        if any(operation.done for operation in self.operations):
            self.ended.extend(operation for operation in self.operations if operation.done)
            self.operations = [operation for operation in self.operations if not operation.done]

    def break_off(self, error: Exception) -> None:
        """What moves frames has failed, so nothing can be trusted to end: everything ends with that."""
        bug = Bug(rank=self.name_of(self.rank), why=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        for communicator in tuple(self._communicators.values()):
            with suppress(Exception):
                communicator.fail(bug)
        self.sort_out()

    @property
    def has_lost(self) -> bool:
        """Whether a peer is gone and nobody has drawn the consequences yet."""
        return any(link.lost and link.peer not in self._buried for link in self.links.values())

    def bury(self) -> None:
        """Peers that are gone: what they sent before still counts, and what needs more of them has failed."""
        while self.round() or self.make_way():
            pass
        for link in self.links.values():
            if link.lost and link.peer not in self._buried:
                self._buried.add(link.peer)
                for communicator in tuple(self._communicators.values()):
                    communicator.peer_lost(link.peer, link.lost)
        self.sort_out()

    @property
    def unsent(self) -> bool:
        return any(self._outbox.values()) or any(link.unsent for link in self.links.values())

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._outbox.clear()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
