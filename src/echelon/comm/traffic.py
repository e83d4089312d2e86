"""What this process sent and how long its calls took: counted while it runs, read as rows that do not change.

    before = group.traffic
    ...
    print(group.traffic - before)     what went out in between

A message is a frame that a call handed to a transport, also an empty one (a barrier is nothing else). What keeps the
calls going (grants, questions and their answers) and the headers are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Place = tuple[str, int, str]
"""Operation, peer, transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What calls of one operation sent to one peer. `seconds` is the sum over those that ended of the time from the
    beginning of the call until the last byte to that peer was handed to the transport.
    """

    op: str
    peer: int
    transport: str
    size_bytes: int = 0
    messages: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Calls of one operation that ended, `failed` of them with an error, and the time from begin to end, summed: calls
    that were under way together count each for itself. `predicted_bytes` is what was known when they began.
    """

    op: str
    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    predicted_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The traffic up to a moment, or between two of them. Rows in the order in which they first happened."""

    sent: tuple[Sent, ...] = ()
    called: tuple[Called, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(row.size_bytes for row in self.sent)

    @property
    def messages(self) -> int:
        return sum(row.messages for row in self.sent)

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        """What came since `earlier`; rows in which nothing happened are left out."""
        return self._with(earlier, -1)

    def __add__(self, other: Snapshot) -> Snapshot:
        return self._with(other, 1)

    def _with(self, other: Snapshot, sign: int) -> Snapshot:
        sent = {(row.op, row.peer, row.transport): row for row in self.sent}
        for theirs in other.sent:
            place = theirs.op, theirs.peer, theirs.transport
            mine = sent.get(place) or Sent(op=theirs.op, peer=theirs.peer, transport=theirs.transport)
            sent[place] = Sent(
                op=mine.op,
                peer=mine.peer,
                transport=mine.transport,
                size_bytes=mine.size_bytes + sign * theirs.size_bytes,
                messages=mine.messages + sign * theirs.messages,
                seconds=mine.seconds + sign * theirs.seconds,
            )
        called = {row.op: row for row in self.called}
        for them in other.called:
            we = called.get(them.op) or Called(op=them.op)
            called[them.op] = Called(
                op=we.op,
                calls=we.calls + sign * them.calls,
                failed=we.failed + sign * them.failed,
                seconds=we.seconds + sign * them.seconds,
                predicted_bytes=we.predicted_bytes + sign * them.predicted_bytes,
            )
        return Snapshot(
            sent=tuple(row for row in sent.values() if row.messages),
            called=tuple(row for row in called.values() if row.calls),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"sent": [asdict(row) for row in self.sent], "called": [asdict(row) for row in self.called]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Snapshot:
        return cls(
            sent=tuple(Sent(**row) for row in values["sent"]), called=tuple(Called(**row) for row in values["called"])
        )


class Traffic:
    """Counts, under the lock of the fabric. `rows` hold bytes and messages; `begun_bytes` is what the calls begun up to
    now were going to send; `handed_s` is summed over calls, from their beginning until the last message to a place was
    handed over.
    """

    def __init__(self) -> None:
        self.rows: dict[Place, list[int]] = {}
        self.begun_bytes = 0
        self.handed_s: defaultdict[Place, float] = defaultdict(float)
        self._called: dict[str, tuple[int, int, float, int]] = {}

    def count(self, place: Place, size_bytes: int) -> None:
        """A message was handed to the transport."""
        row = self.rows.get(place)
        if row is None:
            row = self.rows[place] = [0, 0]
        row[0] += size_bytes
        row[1] += 1

    def by_formula(self, place: Place, size_bytes: int) -> None:
        """A call that somebody else carries, of which neither messages nor seconds are known."""
        self.count(place, size_bytes)
        self.begun_bytes += size_bytes
        self.ended(place[0], 0.0, False, size_bytes)

    def ended(self, op: str, seconds: float, failed: bool, predicted_bytes: int) -> None:
        """A call is over."""
        calls, failures, total_s, total_bytes = self._called.get(op, (0, 0, 0.0, 0))
        self._called[op] = calls + 1, failures + failed, total_s + seconds, total_bytes + predicted_bytes

    @property
    def sent_bytes(self) -> int:
        return sum(row[0] for row in self.rows.values())

    def snapshot(self) -> Snapshot:
        sent = [
            Sent(
                op=place[0],
                peer=place[1],
                transport=place[2],
                size_bytes=row[0],
                messages=row[1],
                seconds=self.handed_s.get(place, 0.0),
            )
            for place, row in self.rows.items()
        ]
        called = [
            Called(op=op, calls=calls, failed=failed, seconds=seconds, predicted_bytes=predicted_bytes)
            for op, (calls, failed, seconds, predicted_bytes) in self._called.items()
        ]
        return Snapshot(sent=tuple(sent), called=tuple(called))
