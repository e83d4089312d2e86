"""One group on the fabric: numbers its calls, hands frames to the call they belong to, fails as a whole."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from echelon.comm.call import describe
from echelon.comm.collective import Collective
from echelon.comm.frame import Call, Header, Kind
from echelon.comm.mailbox import Mailbox
from echelon.comm.operation import Operation
from echelon.comm.ring import Bytes
from echelon.comm.suspicion import DONE, NOT_YET, UNDER_WAY, Suspicion
from echelon.errors import EchelonError, OutOfStep, PeerLost, decode, encode

if TYPE_CHECKING:
    from echelon.comm.fabric import Fabric


class Communicator:
    """`members` are the group's ranks as the fabric numbers them, `rank` is this one's place among them. Everything
    here is called under the fabric's lock.
    """

    def __init__(self, fabric: Fabric, ident: int, members: Sequence[int], timeout_s: float) -> None:
        self.fabric = fabric
        self.id = ident
        self.members = tuple(members)
        self.size = len(members)
        self.rank = self.members.index(fabric.rank)
        self.timeout_s = timeout_s
        self.mailbox = Mailbox()
        self.failed: EchelonError | None = None
        self.place = {member: place for place, member in enumerate(members)}
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self._calls = 0
        self._messages = 0
        self._collectives: dict[int, Collective] = {}
        self._early: dict[int, list[tuple[int, Header, Bytes]]] = defaultdict(list)
        self.suspicion = Suspicion(self)

    def name_of(self, peer: int) -> int:
        """The rank of a member, as users know it."""
        return self.fabric.name_of(self.members[peer])

    # -- starting

    def next_call(self) -> int:
        self._calls += 1
        return self._calls

    def next_message(self) -> int:
        self._messages += 1
        return self._messages

    def begin(self, collective: Collective) -> None:
        self._collectives[collective.seq] = collective
        try:
            collective.start()
            for peer, header, payload in self._early.pop(collective.seq, []):
                self._for_collective(peer, header, payload, keep=True)
        except Exception as error:
            self.fabric.break_off(error)
            raise
        self.check(collective)

    def check(self, operation: Operation) -> None:
        """Refuse at once what cannot end any more. What a peer had sent before it was lost still counts."""
        for member in operation.needed():
            link = self.fabric.links.get(member)
            if link is not None and link.lost:
                self.peer_lost(member, link.lost)
        self.check_failed()

    def check_failed(self) -> None:
        if self.failed is not None:
            raise self.failed

    # -- what operations ask for

    def send(self, operation: Operation, peer: int, header: Header, payload: Bytes | None) -> bool:
        member = self.members[peer]
        if not self.fabric.send(member, header, payload):
            return False
        place = operation.op, self.name_of(peer), self.fabric.links[member].transport
        self.fabric.traffic.count(place, header.size)
        operation.handed[place] = time.monotonic()
        return True

    def control(self, peer: int, header: Header, payload: Bytes | None = None) -> None:
        self.fabric.control(self.members[peer], header, payload)

    def ended(self, collective: Collective) -> None:
        self._collectives.pop(collective.seq, None)

    # -- what arrives

    def arrived(self, member: int, header: Header, payload: Bytes, *, keep: bool) -> bool:
        """Take a frame; False if its turn has not come and it may stay where it is. `keep`: set it aside instead."""
        peer = self.place[member]
        if self.failed is not None:
            return True
        match header.kind:
            case Kind.DATA | Kind.READY:
                return self._for_collective(peer, header, payload, keep=keep)
            case Kind.OFFER:
                self.mailbox.offered(peer, header, payload)
            case Kind.GRANT:
                self.mailbox.granted(peer, header)
            case Kind.MESSAGE:
                self.mailbox.segment(peer, header, payload)
            case Kind.ASK:
                self._asked(peer, header)
            case Kind.ANSWER:
                self.suspicion.answers[peer] = header.tag
            case Kind.ABORT:
                # Told on: who told us may not have come to the others yet, and this rank may be gone before it does.
                self.fail(decode(json.loads(payload.tobytes())))
        return True

    def _for_collective(self, peer: int, header: Header, payload: Bytes, *, keep: bool) -> bool:
        collective = self._collectives.get(header.seq)
        if collective is None:
            if header.seq <= self._calls:
                self._too_late(peer, header)
            else:
                self._early[header.seq].append((peer, header, payload.copy()))
            return True
        mine = collective.call_with(header)
        if header.call != mine:
            self.disagree(peer, mine, header.call)
            return True
        if header.kind == Kind.READY:
            collective.ready(peer)
            return True
        if not collective.stash[peer] and collective.take(header, payload):
            return True
        if keep:
            collective.stash[peer].append((header, payload.copy()))
        return keep

    def take_kept(self) -> bool:
        """Apply frames set aside whose turn has come."""
        moved = False
        for collective in tuple(self._collectives.values()):
            for kept in tuple(collective.stash.values()):
                while kept and collective.take(*kept[0]):
                    kept.popleft()
                    moved = True
        return moved

    def _too_late(self, peer: int, header: Header) -> None:
        """A frame for a call that is over here: its sender called something that needed more of this rank."""
        mine = f"call {self._calls} of the group, with call {header.seq} behind it"
        theirs = f"call {header.seq}, {describe(header.call)}"
        self.fail(OutOfStep(self.name_of(self.rank), mine, self.name_of(peer), theirs))

    def disagree(self, peer: int, mine: Call, theirs: Call) -> None:
        """Two ranks called something else where they should have called the same."""
        me = self.name_of(self.rank)
        self.fail(OutOfStep(me, describe(mine), self.name_of(peer), describe(theirs)))

    # -- waiting too long

    def _asked(self, peer: int, header: Header) -> None:
        collective = self._collectives.get(header.seq)
        if collective is not None and header.call._replace(numel=0) != collective.call._replace(numel=0):
            self.disagree(peer, collective.call, header.call)
            return
        state = UNDER_WAY if collective is not None else DONE if header.seq <= self._calls else NOT_YET
        self.control(peer, Header(Kind.ANSWER, Call(), self.id, header.seq, 0, state))

    # -- failing

    def peer_lost(self, member: int, why: str) -> None:
        """A member is gone. Whatever still needs it has failed, and with it the group."""
        if member not in self.place or self.failed is not None:
            return
        for operation in (*self._collectives.values(), *self.mailbox.under_way()):
            if member in operation.needed():
                self.fail(PeerLost(self.fabric.name_of(member), f"{operation.name} ({why})"))
                return

    def fail(self, error: EchelonError) -> None:
        """Everything under way ends with the error, here and on the others."""
        if self.failed is not None:
            return
        self.failed = error
        for peer in self.others:
            self.control(peer, *abort_frame(self.id, error))
        self._end_all(error)

    def leave(self) -> None:
        """The group is given up here, while others may go on: nobody may wait for what it still had to do."""
        self.failed = self.failed or given_up_by(self.name_of(self.rank))
        self._end_all(self.failed)

    def _end_all(self, error: EchelonError) -> None:
        for operation in (*self._collectives.values(), *self.mailbox.under_way()):
            operation.finish(error)
        self._collectives.clear()
        self._early.clear()
        self.mailbox.clear()


def abort_frame(group: int, error: EchelonError) -> tuple[Header, Bytes]:
    """Tells a member that the group has failed, and of what."""
    text: Bytes = np.frombuffer(json.dumps(encode(error)).encode(), dtype=np.uint8)
    return Header(Kind.ABORT, Call(), group, 0, 0, 0, 0, text.size), text


def given_up_by(rank: int) -> PeerLost:
    return PeerLost(rank, "a call (it has destroyed the group)")
