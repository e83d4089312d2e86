"""Whoever waits for something drives the fabric: it moves frames, and sleeps when there is nothing to move.

A thread of its own drives what nobody waits for, and answers when another rank asks whether this one is alive.

    submit: what goes at once ... wait: round, round, ... sleep, round -> done
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence

from echelon.comm.communicator import Communicator
from echelon.comm.fabric import Fabric
from echelon.comm.link import Link
from echelon.comm.operation import Operation
from echelon.comm.ring import Segment
from echelon.comm.sleepers import Sleepers, drain

INLINE_S = 0.001
"""A small call that is not waited for is driven so long by its caller, before it is left to the thread."""
IDLE_S = 0.2
"""How often a thread with nothing to do looks around."""
BACKSTOP_S = 1.0
"""The longest sleep, should a wake-up be lost."""
LOOK_S = 0.05
"""How often it is looked whether those who were asked have answered."""
LINGER_S = 2.0
"""How long closing waits for what is still to be written."""


class Driver:
    """Moves one fabric. `inbox` is this process's own segment, `wake` the event descriptor its peers write to;
    `spins` are the rounds without news before sleeping: more cost others their core.
    """

    def __init__(self, fabric: Fabric, inbox: Segment | None, wake: int, spins: int) -> None:
        self.fabric = fabric
        self._lock = fabric.lock
        self._sleepers = Sleepers(fabric, inbox, wake)
        self._spins = spins
        self._waiters = 0
        self._closed = False
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="echelon-comm", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation, *, background: bool, small: bool) -> None:
        """Begin; what nobody is going to wait for goes on for a moment, and then on the thread."""
        with self._lock:
            self.fabric.operations.append(operation)
            self.fabric.traffic.begun_bytes += operation.predicted_bytes
        self._round()
        if background and not operation.done:
            if small:
                self._drive(operation, time.monotonic() + INLINE_S)
            if not operation.done:
                with self._lock:
                    self._call_the_thread()

    def wait(self, operation: Operation, until: float | None = None) -> bool:
        """Drive until the operation is done, or `until` has come (False). Its own bound ends it with an error."""
        if not operation.done:
            with self._lock:
                self._waiters += 1
            try:
                self._drive(operation, until)
            finally:
                with self._lock:
                    self._waiters -= 1
                    if self.fabric.operations and not self._waiters:
                        self._call_the_thread()
        return operation.done

    def _call_the_thread(self) -> None:
        if not self._closed:
            os.eventfd_write(self._nudge, 1)

    def _drive(self, operation: Operation, until: float | None) -> None:
        idle = 0
        while not operation.done:
            idle = 0 if self._round() else idle + 1
            if not idle or operation.done:
                continue
            if idle <= self._spins:
                os.sched_yield()
                continue
            now = time.monotonic()
            if until is not None and now >= until:
                return
            self._look_at_the_clock(operation, now)
            bounds = [operation.deadline, operation.ask_at, now + BACKSTOP_S, *([] if until is None else [until])]
            if self._sleep(min(bounds) - now if now < operation.deadline else LOOK_S):
                idle = 0

    def _round(self) -> bool:
        with self._lock:
            moved = self._move()
            if self._sleepers.miss_something:
                self._sleepers.wake()
        self._tell()
        return moved

    def _move(self) -> bool:
        """A round of the fabric. What fails there is a bug, and nobody may be left waiting for it."""
        try:
            return self.fabric.round()
        except Exception as error:
            self.fabric.break_off(error)
            self._sleepers.wake()
            raise

    def _tell(self) -> None:
        """Call those who wanted to hear of an end. Not under the lock: what they do is theirs."""
        ended = self.fabric.ended
        while ended:
            try:
                operation = ended.popleft()
            except IndexError:
                return
            operation.tell()

    def _look_at_the_clock(self, operation: Operation, now: float) -> None:
        """A long wait: ask the others. Too long a one: find out who is silent, and end it with that."""
        with self._lock:
            if operation.done:
                return
            if now >= operation.deadline:
                operation.communicator.suspicion.look(operation, now)
            elif now >= operation.ask_at:
                operation.ask_at = operation.deadline
                operation.communicator.suspicion.ask(operation)

    def _sleep(self, longest_s: float) -> bool:
        """Until something happens on a link, or another thread moved something; whether there was something to do."""
        with self._lock:
            if self._closed:
                return False
            bed = self._sleepers.lie_down()
        events: list[tuple[int, int]] = []
        owner: dict[int, Link] = {}
        try:
            with self._lock:
                moved = self._move() or self.fabric.make_way() or self.fabric.has_lost
                poll, owner = self._sleepers.watch(bed)
                if self.fabric.ended:
                    self._sleepers.wake()
            if not moved:
                events = poll.poll(max(0.0, longest_s) * 1000)
        finally:
            with self._lock:
                self._sleepers.get_up(bed)
        with self._lock:
            self._look([(fd, event) for fd, event in events if fd != bed], owner)
        return self._round() or moved

    def _look(self, events: Sequence[tuple[int, int]], owner: dict[int, Link]) -> None:
        if self._closed:
            return  # its descriptors are about to go
        for fd, _ in events:
            if fd in owner:
                owner[fd].look()
            else:
                drain(fd)
        if self.fabric.has_lost:
            self.fabric.bury()
            self._sleepers.wake()

    def _run(self) -> None:
        """The thread."""
        while not self._closed:
            waiting = tuple(self.fabric.operations)
            if not waiting or self._waiters:
                self._idle()
            elif not self._round():
                now = time.monotonic()
                for operation in waiting:
                    self._look_at_the_clock(operation, now)
                self._sleep(LOOK_S if any(now >= operation.deadline for operation in waiting) else IDLE_S)

    def _idle(self) -> None:
        """Nothing to drive, or somebody else drives."""
        poll = select.poll()
        poll.register(self._nudge, select.POLLIN)
        if poll.poll(IDLE_S * 1000):
            drain(self._nudge)
        elif not self._waiters and not self._closed:
            self._round()
            with self._lock:
                poll, owner = self._sleepers.watch()
                self._look(poll.poll(0), owner)
            self._round()

    def leave(self, communicator: Communicator) -> bool:
        """Give up a group and whatever is under way in it; whether it was the last."""
        with self._lock:
            communicator.leave()
            self.fabric.sort_out()
            self._sleepers.wake()
            is_last = self.fabric.remove(communicator)
        self._tell()
        return is_last

    def close(self) -> None:
        """Write what is still to be written, for a while, and let go of everything. A second time there is nothing."""
        until = time.monotonic() + LINGER_S
        while self.fabric.unsent and time.monotonic() < until:
            self._round()
            time.sleep(0.001)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._nudge, 1)
            self._sleepers.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(LINGER_S)
        # Whoever sleeps in another thread wakes now; until then the descriptors are still in use.
        while self._sleepers and time.monotonic() < until + LINGER_S:
            time.sleep(0.0005)
        with self._lock:
            self.fabric.close()
            self._sleepers.close()
            os.close(self._nudge)
