"""Shared memory between two ranks of a host: frames in rings, in a segment that has no name.

Every rank makes one segment, its inbox, and gives each of the others a ring in it to write to:

    | asleep | ring of rank 1: tail, head, wants room, frames ... | ring of rank 2 ... |

The segment is a memfd that was passed over a socket: no limit of /dev/shm applies, and when the last process that maps
it is gone, however it died, so is the memory. A ring has one writer and one reader; each only ever writes its own
index, after the bytes it stands for. That order is what x86 promises for plain stores, so other processors do not
use this (see rendezvous.py).
"""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from echelon.comm.frame import FRAME_BYTES, HEADER_BYTES, Header, Kind, unpack_from

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
LINE = 64
_WORD = 8
_TAIL, _HEAD, _WANTS_ROOM = 0, LINE // _WORD, 2 * LINE // _WORD
_RING_HEADER = PAGE
RING_BYTES = 4 * (FRAME_BYTES + LINE)
assert RING_BYTES % LINE == 0

_barrier = threading.Lock()


def fence() -> None:
    """Everything stored before is seen before anything loaded after. Taking a lock is an atomic instruction."""
    with _barrier:
        pass


class Segment:
    """The mapped memory of an inbox, one's own or a peer's."""

    def __init__(self, fd: int, rings: int) -> None:
        self.memory = mmap.mmap(fd, size_of(rings))
        self.view = memoryview(self.memory)
        self.words = self.view.cast("Q")
        self.bytes: Bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.rings = rings

    @property
    def asleep(self) -> bool:
        return bool(self.words[0])

    @asleep.setter
    def asleep(self, value: bool) -> None:
        self.words[0] = int(value)


def size_of(rings: int) -> int:
    return PAGE + rings * (_RING_HEADER + RING_BYTES)


def make_segment(rings: int) -> tuple[int, Segment]:
    """An inbox with room for so many writers, and the descriptor to give to them."""
    fd = os.memfd_create("echelon", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_of(rings))
    return fd, Segment(fd, rings)


class _Ring:
    def __init__(self, segment: Segment, index: int) -> None:
        start = PAGE + index * (_RING_HEADER + RING_BYTES)
        self._segment = segment
        self._words = segment.words
        self._tail = start // _WORD + _TAIL
        self._head = start // _WORD + _HEAD
        self._wants_room = start // _WORD + _WANTS_ROOM
        self._base = start + _RING_HEADER
        self._view = segment.view
        self._bytes = segment.bytes


def _padded(size: int) -> int:
    return HEADER_BYTES + (size + LINE - 1) // LINE * LINE


class Writer(_Ring):
    """The sending end. `wake` is the reader's event descriptor."""

    def __init__(self, segment: Segment, index: int, wake: int) -> None:
        super().__init__(segment, index)
        self._wake = wake
        self._position = 0

    def push(self, header: Header, payload: Bytes | None) -> bool:
        """Write a frame if there is room for it."""
        size = HEADER_BYTES if payload is None else _padded(payload.size)
        at = self._position % RING_BYTES
        skip = RING_BYTES - at if at + size > RING_BYTES else 0
        if self._position + skip + size - self._words[self._head] > RING_BYTES:
            self._words[self._wants_room] = 1
            fence()
            if self._position + skip + size - self._words[self._head] > RING_BYTES:
                return False
        if skip:
            self._view[self._base + at] = Kind.SKIP
            self._position += skip
            at = 0
        if payload is not None:
            start = self._base + at + HEADER_BYTES
            self._bytes[start : start + payload.size] = payload
        header.pack_into(self._view, self._base + at)
        self._position += size
        self._words[self._tail] = self._position
        fence()
        if self._segment.words[0]:
            os.eventfd_write(self._wake, 1)
        return True


class Reader(_Ring):
    """The receiving end. `wake` is the writer's event descriptor."""

    def __init__(self, segment: Segment, index: int, wake: int) -> None:
        super().__init__(segment, index)
        self._wake = wake
        self._position = 0

    def peek(self) -> tuple[Header, Bytes] | None:
        """The next frame, in place: valid until `pop`."""
        while self._words[self._tail] != self._position:
            at = self._position % RING_BYTES
            if self._view[self._base + at] == Kind.SKIP:
                self._advance(RING_BYTES - at)
                continue
            header = unpack_from(self._view, self._base + at)
            start = self._base + at + HEADER_BYTES
            return header, self._bytes[start : start + header.size]
        return None

    def pop(self, header: Header) -> None:
        self._advance(_padded(header.size))

    def _advance(self, size: int) -> None:
        self._position += size
        self._words[self._head] = self._position
        fence()
        if self._words[self._wants_room]:
            self._words[self._wants_room] = 0
            os.eventfd_write(self._wake, 1)
