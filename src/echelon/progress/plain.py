"""Progress as plain lines: the first step, then one now and then, the last; everything else as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from echelon.progress import lines
from echelon.progress.tally import Tally


def interval(elapsed_s: float) -> float:
    """Seconds between two step lines: 2 at first, to see it work; up to 30 later, so that a log stays short."""
    return min(30.0, max(2.0, elapsed_s / 30))


class PlainProgress:
    """Lines on any stream, or none."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tally = Tally()
        self._shown_step: int | None = None
        self._shown_at = self._saved_at = 0.0
        self._warned: set[str] = set()

    def __call__(self, event: Mapping[str, Any]) -> None:
        now, kind = self._clock(), event.get("event")
        if kind in ("end", "stopped"):
            self._write_step(now)
        if kind == "start":
            self._tally, self._shown_step = Tally(), None
        self._tally.add(event, now)
        if kind == "step":
            if self._shown_step is None or self._is_last() or now - self._shown_at >= interval(now - self._tally.began):
                self._write_step(now)
            return
        if self._is_worth_a_line(event, now):
            self._write(lines.describe(event))

    def close(self) -> None:
        """Says where it was if the training broke off between two lines."""
        if self._tally.running:
            self._write_step(self._clock())
        self._stream = None

    def _is_last(self) -> bool:
        return self._tally.step == self._tally.total

    def _is_worth_a_line(self, event: Mapping[str, Any], now: float) -> bool:
        if event.get("event") == "checkpoint":
            worth = not self._saved_at or now - self._saved_at >= interval(now - self._tally.began)
            self._saved_at = now if worth else self._saved_at
            return worth
        if event.get("event") == "warning":
            return new_warning(event, self._warned)
        return True

    def _write_step(self, now: float) -> None:
        if self._tally.step and self._tally.loss is not None and self._tally.step != self._shown_step:
            self._write([lines.step_line(self._tally, now)])
            self._shown_step, self._shown_at = self._tally.step, now

    def _write(self, texts: list[str]) -> None:
        if self._stream is None or not texts:
            return
        try:
            write(self._stream, "".join(f"{text}\n" for text in texts))
        except (OSError, ValueError):  # a pipe nobody reads, a closed file: the training matters more
            self._stream = None


def new_warning(event: Mapping[str, Any], warned: set[str]) -> bool:
    """Whether this warning was not shown before: every rank tends to say the same."""
    message = str(event.get("message"))
    if message in warned:
        return False
    warned.add(message)
    return True


def write(stream: TextIO, text: str) -> None:
    """One write, so that other processes' output falls before or after it; what the encoding lacks is spelled out."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
