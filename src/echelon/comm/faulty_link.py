"""A link on which faults happen, on their way out: around a real one, for tests.

    push -> chosen by a rule? -> delay: wait in line, drop: nothing more goes out, cut: close, corrupt: damage -> link

Nothing of this exists on a link that no rule concerns.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from echelon.comm.fabric import Fabric
from echelon.comm.faults import Chooser, Rule
from echelon.comm.frame import Header
from echelon.comm.link import Link
from echelon.comm.ring import Bytes
from echelon.comm.stream import Parts, StreamLink
from echelon.errors import ConfigError

LONGEST_LINE = 64
"""So many frames wait behind a delayed one; then the sender finds no room."""


def inject(fabric: Fabric, rules: Sequence[Rule]) -> None:
    """Put a faulty link in the place of each that a rule concerns.

    `corrupt` is refused where frames go through shared memory: there is no checksum there and nothing on the way that
    could change a byte, so a damaged frame would be applied, and the test would only find what it has written itself.
    """
    me = fabric.name_of(fabric.rank)
    with fabric.lock:
        for peer, link in tuple(fabric.links.items()):
            name = fabric.name_of(peer)
            chooser = Chooser(rules, me, name)
            if not chooser.faults:
                continue
            if "corrupt" in chooser.faults and not isinstance(link, StreamLink):
                raise ConfigError(
                    "faults",
                    f"corrupt from rank {me} to rank {name}: they share memory, where no byte changes on its way and "
                    "no checksum would find it; name a peer that is reached over tcp",
                )
            fabric.links[peer] = FaultyLink(link, chooser)


class FaultyLink:
    """Called under the fabric's lock, as the link inside."""

    def __init__(self, link: Link, chooser: Chooser) -> None:
        self.peer = link.peer
        self.transport = link.transport
        self._link = link
        self._chooser = chooser
        self._cut: str | None = None
        self._is_silent = False
        self._line: deque[tuple[float, Header, Bytes | None, Rule | None]] = deque()
        """What waits: when it may leave, and the rule by which it is to be damaged."""
        self._due = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._timer: threading.Timer | None = None

    @property
    def lost(self) -> str | None:
        return self._cut or self._link.lost

    def push(self, header: Header, payload: Bytes | None) -> bool:
        self._move_up()
        if len(self._line) >= LONGEST_LINE:
            return False
        rule = self._chooser.choose(header)
        fault = rule.fault if rule is not None else None
        if fault == "cut":
            self._pull()
            return False
        self._is_silent = self._is_silent or fault == "drop"
        if self._is_silent:
            return True
        due = time.monotonic() + (rule.seconds if rule is not None else 0.0)
        damages = rule if fault == "corrupt" else None
        if fault == "delay" or self._line or not self._send(header, payload, damages):
            self._line.append((due, header, None if payload is None else payload.copy(), damages))
            self._move_up()
        return True

    def _send(self, header: Header, payload: Bytes | None, damages: Rule | None) -> bool:
        if damages is None:
            return self._link.push(header, payload)
        assert isinstance(self._link, StreamLink)
        self._link.on_wire = partial(damage, byte=damages.byte)
        try:
            return self._link.push(header, payload)
        finally:
            self._link.on_wire = None

    def _move_up(self) -> None:
        """Send those in line whose time has come, and set the clock for the next."""
        if self.lost:
            self._line.clear()
        while self._line:
            due, header, payload, damages = self._line[0]
            left_s = due - time.monotonic()
            if left_s > 0:
                self._wake_in(left_s)
                return
            if not self._send(header, payload, damages):
                return
            self._line.popleft()

    def _wake_in(self, seconds: float) -> None:
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(seconds, self._ring)
            self._timer.daemon = True
            self._timer.start()

    def _ring(self) -> None:
        with suppress(OSError):  # closed by now
            os.eventfd_write(self._due, 1)

    def _pull(self) -> None:
        """Close what joins the two processes: sockets, or the one by which they see each other's end."""
        for fd, _ in self._link.watched():
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:  # a pidfd is no socket
                end.shutdown(socket.SHUT_RDWR)
        self._cut = "the link was cut by a rule"

    def peek(self) -> tuple[Header, Bytes] | None:
        return self._link.peek()

    def pop(self) -> None:
        self._link.pop()

    @property
    def unsent(self) -> bool:
        return not self.lost and (bool(self._line) or self._link.unsent)

    def flush(self) -> None:
        self._move_up()
        self._link.flush()

    def watched(self) -> Sequence[tuple[int, bool]]:
        return [*self._link.watched(), (self._due, False)]

    def look(self) -> None:
        try:
            os.eventfd_read(self._due)
        except BlockingIOError:
            self._link.look()
        else:
            self._move_up()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._link.close()
        os.close(self._due)


def damage(parts: Parts, byte: int | None = None) -> Parts:
    """The bytes as they leave, one of them changed: the one that is named, or else in the middle of the frame."""
    frame = bytearray().join(parts)
    frame[min(len(frame) - 1, len(frame) // 2 if byte is None else byte)] ^= 0x40
    return [frame]
