"""The messages of one group: what is offered and not asked for yet, and what is asked for and not offered."""

from __future__ import annotations

from collections import deque

from echelon.comm.frame import Header
from echelon.comm.message import Receiving, Sending
from echelon.comm.operation import Operation
from echelon.comm.ring import Bytes


class Mailbox:
    """Matches in order: the first that was asked for gets the first that fits."""

    def __init__(self) -> None:
        self._sending: dict[tuple[int, int], Sending] = {}
        self._expected: dict[tuple[int, int], Receiving] = {}
        self._offers: deque[tuple[int, Header, Bytes]] = deque()
        self._receiving: list[Receiving] = []

    def send(self, sending: Sending) -> None:
        self._sending[sending.peer, sending.number] = sending

    def sent(self, sending: Sending) -> None:
        self._sending.pop((sending.peer, sending.number), None)

    def receive(self, receiving: Receiving) -> None:
        for offer in self._offers:
            peer, header, payload = offer
            if receiving.accepts(peer, header.tag):
                self._offers.remove(offer)
                receiving.begin(peer, header, payload)
                return
        self._receiving.append(receiving)

    def expect(self, peer: int, number: int, receiving: Receiving) -> None:
        """The rest of a message comes under this number."""
        self._expected[peer, number] = receiving

    def offered(self, peer: int, header: Header, payload: Bytes) -> None:
        for receiving in self._receiving:
            if receiving.accepts(peer, header.tag):
                self._receiving.remove(receiving)
                receiving.begin(peer, header, payload)
                return
        self._offers.append((peer, header, payload.copy()))

    def granted(self, peer: int, header: Header) -> None:
        self._sending[peer, header.seq].grant()

    def segment(self, peer: int, header: Header, payload: Bytes) -> None:
        if self._expected[peer, header.seq].take(header, payload):
            del self._expected[peer, header.seq]

    def under_way(self) -> list[Operation]:
        return [*self._sending.values(), *self._expected.values(), *self._receiving]

    def clear(self) -> None:
        self._sending.clear()
        self._expected.clear()
        self._receiving.clear()
        self._offers.clear()
