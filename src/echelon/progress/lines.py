"""The lines of text that events deserve; the same words on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from echelon.progress import words
from echelon.progress.tally import Tally

GAP = "  "


def describe(event: Mapping[str, Any]) -> list[str]:
    """The lines for an event other than `step`; none for one that is only for the record."""
    writer = _WRITERS.get(str(event.get("event")), _other)
    return [words.harmless(line) for line in writer(event)]


def step_line(tally: Tally, now: float) -> str:
    """Where the training is, in one plain line."""
    parts = [f"step {tally.step}" + (f"/{tally.total}" if tally.total else ""), f"loss {words.number(tally.loss)}"]
    rate, left = tally.samples_per_second, tally.left(now)
    if rate is not None:
        parts.append(f"{words.amount(rate)} samples/s")
    if tally.bytes is not None:
        parts.append(f"{words.size(tally.bytes)}/step")
    if tally.shares:
        parts.append(f"shares {words.shares(tally.shares)}")
    if left is not None:
        parts.append(f"left {words.duration(left)}")
    return GAP.join(parts)


def metrics(values: Mapping[str, Any]) -> str:
    return GAP.join(f"{name} {words.number(value)}" for name, value in values.items())


def _start(event: Mapping[str, Any]) -> list[str]:
    workers = event.get("workers")
    parts = [f"plan {event.get('plan')}"]
    if workers is not None:
        parts.append(f"{workers} worker{'' if workers == 1 else 's'}")
    if event.get("steps"):
        parts.append(f"{event['steps']:,} steps")
    if event.get("parameters"):
        parts.append(f"{words.amount(event['parameters'])} parameters")
    lines = ["echelon  " + GAP.join(parts)]
    if event.get("run"):
        lines.append(f"run      {event['run']}")
    return lines


def _resume(event: Mapping[str, Any]) -> list[str]:
    path = event.get("path")
    return [f"resumed  after step {event.get('step')}" + (f"{GAP}{path}" if path else "")]


def _evaluate(event: Mapping[str, Any]) -> list[str]:
    return [f"step {event.get('step')}  evaluated  {metrics(event.get('metrics') or {})}"]


def _checkpoint(event: Mapping[str, Any]) -> list[str]:
    parts = [f"step {event.get('step')}  saved"]
    if event.get("path"):
        parts.append(PurePath(str(event["path"])).name)
    if event.get("seconds") is not None:
        parts.append(words.span(event["seconds"]))
    return [GAP.join(parts)]


def _stopping(event: Mapping[str, Any]) -> list[str]:
    return [event.get("message") or "stopping: this step is finished and saved first; Ctrl-C again ends it at once"]


def _traffic(event: Mapping[str, Any]) -> list[str]:
    """One line, if anything was sent: what the meter says, and the prediction where it says something else."""
    if not event.get("bytes"):
        return []
    whole = words.size(event["bytes"])
    if event.get("predicted") != event["bytes"]:
        whole += f" (predicted {words.size(event.get('predicted') or 0)})"
    parts = [f"{_sent(row)}" for row in sorted(event.get("by") or [], key=lambda row: -row["bytes"]) if row["bytes"]]
    return [GAP.join([f"sent     {whole}", *parts])]


def _sent(row: Mapping[str, Any]) -> str:
    calls = row["calls"]
    times = f" in {calls:,} calls of {words.span(row['seconds'] / calls)}" if calls and row["seconds"] else ""
    return f"{row['op']} {words.size(row['bytes'])} {'+'.join(row['transports'])}{times}"


def _end(event: Mapping[str, Any]) -> list[str]:
    parts = ["done    "]
    if event.get("steps") is not None:
        parts[0] += f" {event['steps']:,} steps"
    if event.get("seconds") is not None:
        parts.append(words.span(event["seconds"]))
    parts.append(f"loss {words.number(event.get('loss'))}")
    if event.get("metrics"):
        parts.append(metrics(event["metrics"]))
    lines = [GAP.join(parts)]
    if event.get("digest"):
        lines.append(f"digest   {event['digest']}")
    if event.get("run"):
        lines.append(f"run      {event['run']}")
    return lines


def _other(event: Mapping[str, Any]) -> list[str]:
    message = event.get("message")
    return [f"{event.get('event')}: {message}"] if message else []


_WRITERS = {
    "start": _start,
    "resume": _resume,
    "evaluate": _evaluate,
    "checkpoint": _checkpoint,
    "stopping": _stopping,
    "traffic": _traffic,
    "end": _end,
}
