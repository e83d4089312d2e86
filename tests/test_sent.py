"""What all workers sent, added up: of collectives a rank's share, of messages all that there were."""

from __future__ import annotations

import pytest

from echelon.comm import Snapshot
from echelon.comm.traffic import Called, Sent
from echelon.sent import add_up


class Three:
    """A group whose ranks have all sent the same."""

    size = 3

    def __init__(self, snapshot: Snapshot) -> None:
        self.meter = self
        self.read = lambda: snapshot

    def gather(self, value, _during):
        return [value] * self.size


@pytest.mark.parametrize(("op", "calls", "seconds"), [("all_reduce", 4, 2.0), ("send", 12, 6.0), ("receive", 12, 6.0)])
def test_calls_and_seconds_are_of_the_same_calls(op, calls, seconds):
    sent = Sent(op=op, peer=1, transport="shm", size_bytes=10, messages=4)
    called = Called(op=op, calls=4, seconds=2.0, predicted_bytes=10)
    found = add_up(Three(Snapshot(sent=(sent,), called=(called,))))
    (row,) = found["by"]
    assert (row["calls"], row["seconds"]) == (calls, seconds)
    assert row["bytes"] == row["predicted"] == found["bytes"] == 30


def test_calls_of_a_subgroup_are_not_shared_out_among_those_who_are_not_in_it():
    both = Called(op="broadcast", calls=2, seconds=0.5)
    snapshots = [Snapshot(called=(both,)), Snapshot(called=(both,)), Snapshot()]
    group = Three(snapshots[0])
    group.gather = lambda _value, _during: [snapshot.to_dict() for snapshot in snapshots]
    (row,) = add_up(group)["by"]
    assert (row["calls"], row["seconds"]) == (2, 0.5)
