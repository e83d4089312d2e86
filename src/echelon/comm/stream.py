"""A link over sockets: one or several connections to the same peer, used in turn.

Frame k goes over connection k modulo their number and is read there, so that order is kept while as many windows, and
as many interfaces as the connections were made over, carry the bytes. A checksum and the connection's own key in every
header make sure that nothing is applied that the peer did not send.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from echelon.comm.frame import FRAME_BYTES, HEADER_BYTES, Header, is_sealed, seal, unpack_from
from echelon.comm.ring import Bytes

Parts = Sequence[memoryview | bytearray]
"""A frame as it is written: header, payload."""
_BUFFER_BYTES = 2 * (FRAME_BYTES + HEADER_BYTES)


class Lane:
    """One connection: what is still to be written, what has been read."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.leftover = memoryview(b"")
        self.buffer = bytearray(_BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.bytes: Bytes = np.frombuffer(self.buffer, dtype=np.uint8)
        self.start = 0
        self.stop = 0
        self._awaited = 1

    def write(self, parts: Parts) -> None:
        """Write as much as goes; keep a copy of the rest."""
        size = sum(len(part) for part in parts)
        try:
            sent = self.socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < size:
            self.leftover = memoryview(b"".join(parts))[sent:]

    def flush(self) -> None:
        while self.leftover:
            try:
                sent = self.socket.send(self.leftover)
            except (BlockingIOError, InterruptedError):
                return
            self.leftover = self.leftover[sent:]

    def fill(self, wanted: int) -> bool:
        """Read until `wanted` bytes are there; False if they have not come yet."""
        while self.stop - self.start < wanted:
            if self.start + wanted > _BUFFER_BYTES or self.start == self.stop:
                self._to_front()
            try:
                count = self.socket.recv_into(self.view[self.stop :])
            except (BlockingIOError, InterruptedError):
                self._wait_for(self.start + wanted - self.stop)
                return False
            if not count:
                raise ConnectionResetError("it closed the connection")
            self.stop += count
        return True

    def _wait_for(self, size: int) -> None:
        """Let `poll` tell of this connection when so much is there. A slow link brings a frame in 180 packets, and to
        wake for each of them costs more than the frame.
        """
        if size != self._awaited:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._awaited = size

    def _to_front(self) -> None:
        rest = self.stop - self.start
        self.view[:rest] = bytes(self.view[self.start : self.stop])
        self.start, self.stop = 0, rest


class StreamLink:
    """Frames over the connections to one peer. `key` is a secret of this link."""

    transport = "tcp"

    def __init__(self, peer: int, connections: Sequence[socket.socket], key: int) -> None:
        self.peer = peer
        self.lost: str | None = None
        self._lanes = [Lane(connection) for connection in connections]
        self._key = key
        self._sent = 0
        self._received = 0
        self._header: Header | None = None
        self._is_checked = False
        self.on_wire: Callable[[Parts], Parts] | None = None
        """What happens to a frame on its way, where a test has it so (faulty_link.py)."""

    def push(self, header: Header, payload: Bytes | None) -> bool:
        lane = self._lanes[self._sent % len(self._lanes)]
        if lane.leftover:
            self._guarded(lane.flush)
            if lane.leftover:
                return False
        packed = bytearray(HEADER_BYTES)
        checksum = zlib.crc32(payload.data) if payload is not None else 0
        header._replace(checksum=checksum, key=self._key).pack_into(packed, 0)
        seal(packed)
        parts: Parts = [packed] if payload is None else [packed, payload.data]
        self._guarded(partial(lane.write, self.on_wire(parts) if self.on_wire is not None else parts))
        self._sent += 1
        return True

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self.lost = self.lost or (error.strerror or str(error))

    def peek(self) -> tuple[Header, Bytes] | None:
        lane = self._lanes[self._received % len(self._lanes)]
        try:
            if not lane.fill(HEADER_BYTES):
                return None
            header = self._header or self._open(lane)
            if not lane.fill(HEADER_BYTES + header.size):
                return None
        except OSError as error:
            self.lost = self.lost or (error.strerror or str(error))
            return None
        start = lane.start + HEADER_BYTES
        payload = lane.bytes[start : start + header.size]
        if not self._is_checked:
            if header.size and zlib.crc32(payload.data) != header.checksum:
                self.lost = f"a frame of {header.size} bytes was damaged on its way"
                return None
            self._is_checked = True
        return header, payload

    def _open(self, lane: Lane) -> Header:
        """The header of the next frame, once it is known to be one."""
        header = unpack_from(lane.view, lane.start)
        if header.key != self._key:
            raise ConnectionResetError("what came is no frame of this group")
        if not is_sealed(lane.view, lane.start) or header.size > FRAME_BYTES:
            raise ConnectionResetError("the header of a frame was damaged on its way")
        self._header = header
        return header

    def pop(self) -> None:
        assert self._header is not None
        lane = self._lanes[self._received % len(self._lanes)]
        lane.start += HEADER_BYTES + self._header.size
        self._header, self._is_checked = None, False
        self._received += 1

    @property
    def unsent(self) -> bool:
        return not self.lost and any(lane.leftover for lane in self._lanes)

    def flush(self) -> None:
        for lane in self._lanes:
            if lane.leftover:
                self._guarded(lane.flush)

    def watched(self) -> Sequence[tuple[int, bool]]:
        return [] if self.lost else [(lane.socket.fileno(), bool(lane.leftover)) for lane in self._lanes]

    def look(self) -> None:
        self.peek()

    def close(self) -> None:
        for lane in self._lanes:
            lane.socket.close()
