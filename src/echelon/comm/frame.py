"""A frame: what travels between two ranks. 64 bytes of header, then the payload.

Every data frame says which call it belongs to (group and number in it) and what that call is: two ranks that disagree
find out from the first frame, before a byte is applied.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

HEADER_BYTES = 64
FRAME_BYTES = 256 << 10
"""The most payload a frame carries: large enough to make the header cheap, small enough to stay in a cache."""
EAGER_BYTES = 64 << 10
"""So much goes to a peer that may not have called yet; for more, it says that it is ready first."""

_LAYOUT = struct.Struct("<BBBBiqQIIQQIII")
_SEAL = struct.Struct("<I")
SEAL_AT = HEADER_BYTES - _SEAL.size
"""Where in a header its own checksum is: its size is trusted before its payload has come."""
assert _LAYOUT.size <= SEAL_AT


class Kind(IntEnum):
    """What a frame is for."""

    DATA = 1  # a segment of a move of a collective
    READY = 2  # the receiver of a large move is there
    OFFER = 3  # a message to one rank: as a whole if it is small, otherwise to be granted
    GRANT = 4  # the receiver of a large message is there
    MESSAGE = 5  # a segment of a granted message
    ASK = 6  # are you alive, and where?
    ANSWER = 7
    ABORT = 8  # the group failed, and why
    SKIP = 9  # the rest of a ring is empty; it goes on at its start


class Call(NamedTuple):
    """What a rank called, as far as others must have called the same. `numel` is what it moves between the two."""

    op: int = 0
    dtype: int = 0
    reduce: int = 0
    root: int = -1
    numel: int = 0


class Header(NamedTuple):
    """`seq` numbers the calls of a group, or the messages of a link; `offset` and `size` are bytes of the payload in
    the move.
    """

    kind: int
    call: Call = Call()
    group: int = 0
    seq: int = 0
    move: int = 0
    tag: int = 0
    offset: int = 0
    size: int = 0
    checksum: int = 0
    key: int = 0

    def pack_into(self, buffer: memoryview | bytearray, at: int) -> None:
        call = self.call
        _LAYOUT.pack_into(
            buffer, at, self.kind, call.op, call.dtype, call.reduce, call.root, call.numel, self.group, self.seq,
            self.move, self.offset, self.size, self.tag, self.checksum, self.key,
        )  # fmt: skip


def seal(buffer: bytearray) -> None:
    """Write the checksum of a header that starts there."""
    _SEAL.pack_into(buffer, SEAL_AT, zlib.crc32(memoryview(buffer)[:SEAL_AT]))


def is_sealed(view: memoryview, at: int) -> bool:
    """Whether a header is as it was when it was sealed."""
    found: int = _SEAL.unpack_from(view, at + SEAL_AT)[0]
    return found == zlib.crc32(view[at : at + SEAL_AT])


def unpack_from(buffer: memoryview | bytearray, at: int) -> Header:
    kind, op, dtype, reduce, root, numel, group, seq, move, offset, size, tag, checksum, key = _LAYOUT.unpack_from(
        buffer, at
    )
    return Header(kind, Call(op, dtype, reduce, root, numel), group, seq, move, tag, offset, size, checksum, key)
