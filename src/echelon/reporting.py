"""What a run leaves for people: the event log, the job's description, and what is shown while it goes on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from echelon.events import Event, EventLog
from echelon.storage import writing

SHOW_EVERY_S = 0.1


class Line(Protocol):
    """A worker's line to whoever started it: a launcher, or torchrun and the terminal."""

    def meet(self) -> None:
        """Say that this worker is ready and wait until all are."""

    def show(self, record: Event) -> None: ...

    def stop_requested(self) -> bool: ...


class Reporter:
    """Rank 0 writes every event to the run folder and shows it; steps are shown a few times a second at most."""

    def __init__(self, run: Path, rank: int, line: Line) -> None:
        self._log = EventLog(run / "events.jsonl") if rank == 0 else None
        self._line = line
        self._shown = 0.0
        self._waiting: Event | None = None

    def __call__(self, record: Event, *, important: bool = True) -> None:
        if self._log is None:
            return
        self._log(record)
        if not important and record["time"] - self._shown < SHOW_EVERY_S:
            self._waiting = record
            return
        if important and self._waiting is not None and record["event"] != "step":
            self._line.show(self._waiting)  # so that nobody sees a checkpoint of a step they have not seen
        self._waiting = None
        self._shown = record["time"]
        self._line.show(record)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def write_job(run: Path, record: dict[str, Any]) -> None:
    """`job.json`: what ran, with what, so that it can be told apart and replayed."""
    path = run / "job.json"
    with writing(path):
        path.write_text(json.dumps(record, indent=2) + "\n")


def median_step_ms(seconds: Sequence[float]) -> float | None:
    """The median time from commit to commit; the first ten are left out where there are more."""
    kept = seconds[10:] or seconds
    return statistics.median(kept) * 1000 if kept else None


def list_some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
