"""A call under way: what the fabric drives until it is done, and what its caller waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from echelon.comm.traffic import Place

if TYPE_CHECKING:
    from echelon.comm.communicator import Communicator


ASK_S = 1.0
"""After so long a wait the others are asked where they are."""


class Operation:
    """What every call has: a bound, an end, and those who want to hear of it."""

    predicted_bytes = 0
    """The payload that this rank is going to send, known before any of it is sent."""

    def __init__(self, communicator: Communicator, name: str, timeout_s: float, *, op: str) -> None:
        self.communicator = communicator
        self.name = name
        self.op = op
        self.timeout_s = timeout_s
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self.ask_at = self.began + ASK_S
        self.done = False
        self.told = False
        self.error: Exception | None = None
        self.handed: dict[Place, float] = {}
        """When the last message of it was handed over, by peer and transport."""
        self._then: list[Callable[[], None]] = []
        self._before_end: Callable[[], None] | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Once, under the fabric's lock."""
        if not self.done:
            if error is None and self._before_end is not None:
                self._before_end()
            self.error = error
            self.done = True
            seconds = time.monotonic() - self.began
            traffic = self.communicator.fabric.traffic
            traffic.ended(self.op, seconds, error is not None, self.predicted_bytes)
            for place, moment in self.handed.items():
                traffic.handed_s[place] += moment - self.began

    def before_end(self, call: Callable[[], None]) -> None:
        """Something to do with the result before anybody hears that it is there."""
        self._before_end = call

    def then(self, call: Callable[[], None]) -> None:
        """Call it at the end, or now if that was before."""
        with self.communicator.fabric.lock:
            if not self.told:
                self._then.append(call)
                return
        call()

    def tell(self) -> None:
        """Call those who wanted to hear of the end. Not under the lock."""
        with self.communicator.fabric.lock:
            self.told = True
            then, self._then = self._then, []
        for call in then:
            call()

    def push(self) -> bool:
        """Send what can be sent; whether anything was."""
        return False

    def needed(self) -> set[int]:
        """The members without whom it cannot end, as the fabric numbers them."""
        return set()

    def awaited(self) -> set[int]:
        """Those of them for whom it waits now."""
        return self.needed()
