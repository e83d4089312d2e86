"""Pure: what a run has to lose, and a request to stop it, from the first signal to the moment when waiting ends.

One wish to stop often arrives as several signals: `timeout` signals its child and then the whole group, a wrapper
passes on what the terminal has sent already. Only a person who presses Ctrl-C again, later, means a second thing by it.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from echelon.errors import Stopped

AGAIN_S = 1.0  # signals closer than this to the first are one request
LONGEST_S = 3600.0  # a run that goes on and on although asked to stop is ended even so
PROGRESS = frozenset({"start", "resume", "step", "evaluate", "saving", "checkpoint", "stopped", "end"})


@dataclass(kw_only=True)
class Progress:
    """How far a run has come, and from which step it can go on: by the events that were heard of it, and by `on_disk`,
    the newest checkpoint in its folder. One may be there that nobody was left to tell of.
    """

    run: str = ""
    on_disk: Callable[[], int] = field(default=lambda: 0)
    begun: bool = False  # before that, what is in the folder may be another run's
    saved: int = 0
    computed: int = 0  # the last step that this launch has computed
    writes: bool = False  # rank 0 is writing a checkpoint

    def note(self, event: Mapping[str, Any]) -> bool:
        """Whether the event tells of progress."""
        kind = event.get("event")
        self.writes = kind == "saving" or (self.writes and kind != "checkpoint")
        self.begun = self.begun or kind == "start"
        if kind in ("checkpoint", "resume"):
            self.saved = max(self.saved, int(event.get("step") or 0))
        elif kind == "step":
            self.computed = int(event.get("step") or 0)
        return kind in PROGRESS

    def resumable(self) -> int:
        """The step after which the run can go on; 0 if nothing is kept of it."""
        return max(self.saved, self.on_disk() if self.begun and self.run else 0)

    def stopped(self) -> Stopped:
        """For a run that was ended before it could say itself where it stopped."""
        saved = self.resumable()
        return Stopped(saved, self.run, max(self.computed - saved, 0))

    def way_on(self) -> str:
        """What to do about a run that broke off."""
        if self.run and (self.writes or self.resumable()):  # what is being written is waited for
            return f"go on with --resume --out {shlex.quote(self.run)}"
        return "nothing was saved yet, so start it again" if self.computed else "start it again"


@dataclass(kw_only=True)
class Stopping:
    """A request to stop. Workers that say nothing have `grace_s`, or, once there is work to save, `save_s`: a step, an
    evaluation and the saving may each take long, and who does not want to wait for them can say so.
    """

    grace_s: float
    save_s: float
    _asked_at: float | None = None
    _moved_at: float = 0.0

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    def ask(self, now: float) -> bool:
        """Whether this is the first request."""
        if self.asked:
            return False
        self._asked_at = self._moved_at = now
        return True

    def insists(self, number: int, now: float) -> bool:
        """Whether the signal `number` asks once more, and so for an end at once."""
        return number == signal.SIGINT and self._asked_at is not None and now - self._asked_at > AGAIN_S

    def moved(self, now: float) -> None:
        """The workers have come a step further."""
        self._moved_at = now

    def waited_s(self, now: float) -> float:
        return now - (now if self._asked_at is None else self._asked_at)

    def bound(self, progress: Progress) -> float | None:
        """When the workers that have not stopped are ended; None as long as nobody has asked."""
        if self._asked_at is None:
            return None
        patience_s = max(self.grace_s, self.save_s) if progress.computed else self.grace_s
        return min(self._moved_at + patience_s, self._asked_at + LONGEST_S)
