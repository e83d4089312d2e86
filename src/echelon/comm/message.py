"""Messages from one rank to another: matched by group, sender and tag, in the order in which they were sent.

A small message goes out with its offer. A large one is offered, and follows when the receiver has asked for it, so that
nobody has to keep what nobody asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.comm.arithmetic import Array
from echelon.comm.frame import EAGER_BYTES, FRAME_BYTES, Call, Header, Kind
from echelon.comm.operation import Operation
from echelon.comm.ring import Bytes

if TYPE_CHECKING:
    from echelon.comm.communicator import Communicator

ANYONE = -1


class Sending(Operation):
    """One message out. Done when the transport has all of it."""

    def __init__(
        self, communicator: Communicator, peer: int, tag: int, data: Array, call: Call, timeout_s: float
    ) -> None:
        super().__init__(communicator, f"send to rank {communicator.name_of(peer)}", timeout_s, op="send")
        self.peer = peer
        self.number = communicator.next_message()
        self._tag = tag
        self.predicted_bytes = data.size
        self._data = data
        self._call = call
        self._offered = False
        self._granted = data.size <= EAGER_BYTES
        self._at = 0

    def grant(self) -> None:
        self._granted = True

    def push(self) -> bool:
        if not self._offered:
            is_small = self._data.size <= EAGER_BYTES
            if not self._send(Kind.OFFER, self._data if is_small else None):
                return False
            self._offered = True
            if is_small:
                self._end()
            return True
        moved = False
        while self._granted and not self.done:
            segment = self._data[self._at : self._at + FRAME_BYTES]
            if not self._send(Kind.MESSAGE, segment):
                break
            moved = True
            self._at += segment.size
            if self._at >= self._data.size:
                self._end()
        return moved

    def _send(self, kind: Kind, payload: Array | None) -> bool:
        size = 0 if payload is None else payload.size
        # For an offer the place of the offset says how much will come in all.
        offset = self._data.size if kind is Kind.OFFER else self._at
        header = Header(kind, self._call, self.communicator.id, self.number, 0, self._tag, offset, size)
        return self.communicator.send(self, self.peer, header, payload if size else None)

    def _end(self) -> None:
        self.communicator.mailbox.sent(self)
        self.finish()

    def needed(self) -> set[int]:
        return set() if self.done else {self.communicator.members[self.peer]}


class Receiving(Operation):
    """One message in, from `peer` or from anyone."""

    def __init__(
        self, communicator: Communicator, peer: int, tag: int, data: Array, call: Call, timeout_s: float
    ) -> None:
        whom = "anyone" if peer == ANYONE else f"rank {communicator.name_of(peer)}"
        super().__init__(communicator, f"receive from {whom}", timeout_s, op="receive")
        self.peer = peer
        self.tag = tag
        self.call = call
        self.source = ANYONE
        self._data = data
        self._at = 0

    def accepts(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.peer in (ANYONE, source)

    def begin(self, source: int, header: Header, payload: Bytes) -> None:
        """An offer was matched; a small one is all there is."""
        self.source = source
        if header.call != self.call:
            self.communicator.disagree(source, self.call, header.call)
            self.finish(self.communicator.failed)  # the mailbox has it no more
            return
        if header.size == header.offset:
            self._data[:] = payload
            self.finish()
            return
        self.communicator.mailbox.expect(source, header.seq, self)
        self.communicator.control(source, Header(Kind.GRANT, self.call, self.communicator.id, header.seq))

    def take(self, header: Header, payload: Bytes) -> bool:
        """A segment; whether it was the last."""
        self._data[header.offset : header.offset + header.size] = payload
        self._at += header.size
        if self._at >= self._data.size:
            self.finish()
        return self.done

    def needed(self) -> set[int]:
        peer = self.peer if self.source == ANYONE else self.source
        if self.done or peer != ANYONE:
            return set() if self.done else {self.communicator.members[peer]}
        links = self.communicator.fabric.links
        left = self.awaited()
        return left if all(links[member].lost for member in left) else set()  # the last of them is needed

    def awaited(self) -> set[int]:
        peer = self.peer if self.source == ANYONE else self.source
        members = self.communicator.members
        return {members[peer]} if peer != ANYONE else set(members) - {members[self.communicator.rank]}
