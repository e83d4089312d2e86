"""What happened, as records: one JSON object a line in the run folder, the same objects to whoever watches."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from echelon.errors import StorageFailed

Event = dict[str, Any]
Emit = Callable[[Event], None]


def event(name: str, **fields: Any) -> Event:
    return {"event": name, "time": time.time(), **fields}


class EventLog:
    """Appends events to `events.jsonl`. A line is written whole or, after a crash, is the torn last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StorageFailed(str(path), error.strerror or str(error)) from error

    def __call__(self, record: Event) -> None:
        try:
            self._file.write(to_line(record))
        except OSError as error:
            raise StorageFailed(str(self._path), error.strerror or str(error)) from error

    def close(self) -> None:
        self._file.close()


def to_line(record: Event) -> str:
    """One line of JSON. What JSON cannot say is text: `float("nan")` reads it back."""
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_speakable(record), allow_nan=False) + "\n"


def _speakable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _speakable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_speakable(item) for item in value]
    return value


def read_events(path: Path) -> Iterator[Event]:
    """Every whole event of a log; a torn line, and whatever else is no event, is left out."""
    with path.open("rb") as lines:
        for line in lines:
            with suppress(ValueError):
                found = json.loads(line) if line.endswith(b"\n") else None
                if isinstance(found, dict) and "event" in found:
                    yield found


def rewind(path: Path, step: int) -> int:
    """Take back the steps after `step` (a run that died after its last checkpoint computes them again); how many
    there were.

    So the log keeps exactly one `step` event for each committed step.
    """
    if not path.exists():
        return 0
    events = list(read_events(path))
    kept = [e for e in events if not (e["event"] in ("step", "push", "evaluate") and e["step"] > step)]
    lost = len([e for e in events if e["event"] == "step" and e["step"] > step])
    beside = path.with_name(f".{path.name}.rewound")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(to_line(e) for e in kept)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise StorageFailed(str(path), error.strerror or str(error)) from error
    return lost
