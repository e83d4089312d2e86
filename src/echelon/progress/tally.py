"""What the events so far add up to. Pure: the caller says what time it is.

Step events are thinned out by the sender, so a rate is steps over the time between two events, never a count of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WINDOW_S = 10.0  # rates look this far back,
FEWEST_MARKS = 6  # but over at least so many events, for steps that take minutes
STALL_S = 5.0  # no step for this long, and for three usual steps, is worth saying


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A step event as it arrived."""

    at: float
    step: int
    samples: float


class Tally:
    """The state of one training as its display needs it. A display may see several, as under `verify`: one each."""

    def __init__(self) -> None:
        self.running = False
        self.stopping = False
        self.total: int | None = None
        self.step = 0
        self.loss: Any = None
        self.bytes: float | None = None
        self.shares: Mapping[Any, int] = {}
        self.saved: int | None = None
        self.began = 0.0
        self._first_seconds: float | None = None
        self._marks: deque[Mark] = deque()

    def add(self, event: Mapping[str, Any], now: float) -> None:
        kind = event.get("event")
        if kind == "start":
            self.running, self.began, self.total = True, now, event.get("steps") or None
        elif kind == "resume":
            self.step = int(event.get("step") or 0)
        elif kind == "step":
            self._add_step(event, now)
        elif kind == "checkpoint":
            self.saved = event.get("step")
        elif kind == "stopping":
            self.stopping = True
        elif kind in ("end", "stopped"):
            self.running = False

    def _add_step(self, event: Mapping[str, Any], now: float) -> None:
        step = int(event["step"])
        if self._marks and step <= self._marks[-1].step:
            self._marks.clear()  # steps were taken back: the old rate means nothing
        self.step, self.loss = step, event.get("loss")
        self.bytes, self.shares = event.get("bytes"), event.get("shares") or {}
        self._first_seconds = event.get("seconds")
        self._marks.append(Mark(at=now, step=step, samples=float(event.get("samples") or 0)))
        while len(self._marks) > FEWEST_MARKS and now - self._marks[0].at > WINDOW_S:
            self._marks.popleft()

    @property
    def step_seconds(self) -> float | None:
        """Seconds a step takes now; what the event itself says while there is only one."""
        if len(self._marks) < 2:
            return self._first_seconds if self._marks and self._first_seconds else None
        first, last = self._marks[0], self._marks[-1]
        spent = last.at - first.at
        return spent / (last.step - first.step) if spent > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        seconds = self.step_seconds
        if not seconds:
            return None
        return sum(mark.samples for mark in self._marks) / len(self._marks) / seconds

    def left(self, now: float) -> float | None:
        """Seconds to the last step, counting down between events."""
        seconds = self.step_seconds
        if seconds is None or self.total is None:
            return None
        return max(0.0, (self.total - self.step) * seconds - (now - self._marks[-1].at))

    def silent(self, now: float) -> float | None:
        """Seconds without a step, once that is longer than it should be."""
        seconds = self.step_seconds
        if seconds is None:
            return None
        waited = now - self._marks[-1].at
        return waited if waited > max(STALL_S, 3 * seconds) else None
