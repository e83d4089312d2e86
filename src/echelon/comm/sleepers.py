"""Threads of this process that sleep until something happens on a link, and what wakes them.

    peers write to `wake`, or to a socket          everybody who sleeps watches all of these
    a thread that moved something writes to beds   everybody who sleeps has a bed: an event descriptor of its own

Several threads may watch the same descriptors, and what one of them takes out of a descriptor the others do not see any
more. So who gets up deals with all there is, and whoever moves frames wakes those who would sleep through something:
the end of a call, or a lane that waits for room and that none of them watches. All of it under the fabric's lock.
"""

from __future__ import annotations

import os
import select

from echelon.comm.fabric import Fabric
from echelon.comm.link import Link
from echelon.comm.ring import Segment, fence

BEDS = 2
"""So many are kept: for the caller of a collective, and for the thread that drives what nobody waits for."""


class Sleepers:
    """`inbox` is this process's own segment, in which it says that somebody sleeps; `wake` what its peers write to."""

    def __init__(self, fabric: Fabric, inbox: Segment | None, wake: int) -> None:
        self._fabric = fabric
        self._inbox = inbox
        self._wake = wake
        self._spare = [_make_event() for _ in range(BEDS)]
        self._watching: dict[int, frozenset[int]] = {}
        """By bed: the lanes on which it is waited for room to write."""

    def __bool__(self) -> bool:
        return bool(self._watching)

    def lie_down(self) -> int:
        """A bed. From now on peers wake this process; what they wrote before has to be looked for once more."""
        bed = self._spare.pop() if self._spare else _make_event()
        self._watching[bed] = frozenset()
        if self._inbox is not None:
            self._inbox.asleep = True
        fence()
        return bed

    def watch(self, bed: int | None = None) -> tuple[select.poll, dict[int, Link]]:
        """What to poll, and whose each descriptor is; with a bed, what wakes its sleeper."""
        poll = select.poll()
        owner: dict[int, Link] = {}
        written = set()
        for link in self._fabric.links.values():
            for fd, writes in link.watched():
                poll.register(fd, select.POLLIN | (select.POLLOUT if writes else 0))
                owner[fd] = link
                if writes:
                    written.add(fd)
        if bed is not None:
            poll.register(self._wake, select.POLLIN)
            poll.register(bed, select.POLLIN)
            self._watching[bed] = frozenset(written)
        return poll, owner

    def get_up(self, bed: int) -> None:
        del self._watching[bed]
        drain(bed)
        if len(self._spare) < BEDS:
            self._spare.append(bed)
        else:
            os.close(bed)
        if not self._watching and self._inbox is not None:
            self._inbox.asleep = False

    @property
    def miss_something(self) -> bool:
        """Whether a call has ended, or a lane waits for room that none of them watches."""
        return bool(self._watching) and (bool(self._fabric.ended) or (self._fabric.unsent and self._has_unwatched()))

    def _has_unwatched(self) -> bool:
        watched = frozenset().union(*self._watching.values())
        links = self._fabric.links.values()
        return any(writes and fd not in watched for link in links for fd, writes in link.watched())

    def wake(self) -> None:
        """All of them."""
        for bed in self._watching:
            os.eventfd_write(bed, 1)

    def close(self) -> None:
        """Once nobody sleeps any more."""
        self._inbox = None
        for fd in (self._wake, *self._spare):
            os.close(fd)
        self._spare.clear()


def _make_event() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def drain(event: int) -> None:
    """Take what was written to an event descriptor, if anything was."""
    try:
        os.eventfd_read(event)
    except BlockingIOError:
        return
