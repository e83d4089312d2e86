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
from echelon.storage import reason, writing

Event = dict[str, Any]
Emit = Callable[[Event], None]
OF_A_STEP = ("step", "push", "evaluate")  # what is taken back when a step is


def event(name: str, **fields: Any) -> Event:
    return {"event": name, "time": time.time(), **fields}


class EventLog:
    """Appends events to `events.jsonl`. A line is written whole or, after a crash, is the torn last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def __call__(self, record: Event) -> None:
        line = to_line(record).encode()
        with writing(self._path):
            while line:  # nothing is kept back, so a full disk is told of here and not once more at the end
                line = line[self._file.write(line) :]

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
            with suppress(ValueError, RecursionError):
                found = json.loads(line) if line.endswith(b"\n") else None
                if isinstance(found, dict) and _is_event(found):
                    yield found


def _is_event(found: Event) -> bool:
    name = found.get("event")
    return isinstance(name, str) and (name not in OF_A_STEP or type(found.get("step")) is int)


def rewind(path: Path, step: int) -> int:
    """Take back the steps after `step` (a run that died after its last checkpoint computes them again); how many
    there were.

    So the log keeps exactly one `step` event for each committed step.
    """
    try:
        events = list(read_events(path))
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StorageFailed(str(path), f"cannot be read: {reason(error)}") from error
    kept = [e for e in events if not (e["event"] in OF_A_STEP and e["step"] > step)]
    lost = len([e for e in events if e["event"] == "step" and e["step"] > step])
    beside = path.with_name(f".{path.name}.rewound")
    with writing(path):
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(to_line(e) for e in kept)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    return lost
