"""A link: frames to and from one peer, in order, never blocking. What carries them is behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from echelon.comm.frame import Header
from echelon.comm.ring import Bytes, Reader, Writer


class Link(Protocol):
    """Called under the fabric's lock. What `peek` gives stays valid until `pop`."""

    peer: int
    transport: str

    @property
    def lost(self) -> str | None:
        """Why no more frames will come, once that is known; frames that came before may still be there."""

    def push(self, header: Header, payload: Bytes | None) -> bool: ...

    def peek(self) -> tuple[Header, Bytes] | None: ...

    def pop(self) -> None: ...

    @property
    def unsent(self) -> bool:
        """Whether something that `push` accepted has not left yet."""

    def flush(self) -> None:
        """Go on with what `push` accepted and the transport did not yet."""

    def watched(self) -> Sequence[tuple[int, bool]]:
        """Descriptors that become ready when there is something to do, and whether room to write is waited for."""

    def look(self) -> None:
        """One of them became ready: see whether the peer is still there."""

    def close(self) -> None: ...


class RingLink:
    """Through shared memory. `alive` is a descriptor that becomes readable when the peer has ended."""

    transport = "shm"

    def __init__(self, peer: int, writer: Writer, reader: Reader, alive: Sequence[int], owned: Sequence[int]) -> None:
        self.peer = peer
        self.lost: str | None = None
        self._writer = writer
        self._reader = reader
        self._alive = alive
        self._owned = owned
        self._header: Header | None = None

    def push(self, header: Header, payload: Bytes | None) -> bool:
        return self._writer.push(header, payload)

    def peek(self) -> tuple[Header, Bytes] | None:
        found = self._reader.peek()
        if found is not None:
            self._header = found[0]
        return found

    def pop(self) -> None:
        assert self._header is not None
        self._reader.pop(self._header)

    @property
    def unsent(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def watched(self) -> Sequence[tuple[int, bool]]:
        return [] if self.lost else [(fd, False) for fd in self._alive]

    def look(self) -> None:
        self.lost = self.lost or "its process ended"

    def close(self) -> None:
        for fd in self._owned:
            os.close(fd)
        self._owned = ()
