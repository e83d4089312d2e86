"""What all workers sent in a run, by operation, peer and transport, beside what was predicted when each call began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echelon.comm import Group, Snapshot
from echelon.events import Event, event

MESSAGES = ("send", "receive")
"""What a rank calls by itself, and not with all others."""


def add_up(group: Group) -> Event:
    """The `traffic` event: the same on every rank. `by` is over all ranks. `calls` of a collective are those of who
    called it most (not all are in a subgroup), and `seconds` what so many took; of messages they are all that there
    were. `rows` say who sent what to whom.
    """
    taken = group.gather(group.meter.read().to_dict(), "adding up the bytes sent")
    snapshots = [Snapshot.from_dict(values) for values in taken]
    total = sum(snapshots, Snapshot())
    rows = [{"rank": rank, **_row(asdict(row))} for rank, one in enumerate(snapshots) for row in one.sent]
    return event(
        "traffic",
        bytes=total.size_bytes,
        predicted=sum(row.predicted_bytes for row in total.called),
        messages=total.messages,
        by=[_operation(total, snapshots, row.op) for row in total.called],
        rows=rows,
    )


def _row(values: dict[str, Any]) -> dict[str, Any]:
    values["bytes"] = values.pop("size_bytes")
    return values


def _operation(total: Snapshot, snapshots: Sequence[Snapshot], op: str) -> dict[str, Any]:
    called = next(row for row in total.called if row.op == op)
    sent = [row for row in total.sent if row.op == op]
    of_ranks = [row.calls for one in snapshots for row in one.called if row.op == op]
    calls = sum(of_ranks) if op in MESSAGES else max(of_ranks)
    return {
        "op": op,
        "bytes": sum(row.size_bytes for row in sent),
        "predicted": called.predicted_bytes,
        "messages": sum(row.messages for row in sent),
        "transports": sorted({row.transport for row in sent}),
        "calls": calls,
        "seconds": called.seconds / called.calls * calls,
    }
