"""What a person sees while it trains: a live display on a terminal, plain lines anywhere else.

    words   numbers as short text of a steady width
    tally   what the events so far add up to: rate, time left, shares
    lines   the line of text that an event deserves
    plain   lines, for files, pipes, notebooks and terminals without rich
    live    a bar at the bottom of the terminal, with everybody's output above it

It runs in the launcher. A display that cannot write (closed pipe, full disk) falls silent; it never fails the training.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from echelon.progress.plain import PlainProgress

__all__ = ["Show", "progress"]


class Show(Protocol):
    """Takes events as they come, from one thread; `close` ends the display and may be called twice."""

    def __call__(self, event: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def progress(stream: TextIO | None = None) -> Show:
    """The best display that `stream` (standard output unless given) can carry."""
    stream = sys.stdout if stream is None else stream
    if stream is None or not stream.isatty():  # None: started without a standard output
        return PlainProgress(stream)
    try:
        from echelon.progress.live import LiveProgress, Terminal
    except ImportError:
        return PlainProgress(stream)
    terminal = Terminal(stream)
    return LiveProgress(terminal) if terminal.usable else PlainProgress(stream)
