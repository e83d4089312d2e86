"""The meter: what was sent and how long it took, as values that can be subtracted and written down."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.distributed as dist

from comm.ranks import check, run_ranks
from echelon.comm.traffic import Called, Sent, Snapshot, Traffic
from echelon.errors import PeerLost


def counted(*sizes: int) -> Snapshot:
    traffic = Traffic()
    for size in sizes:
        traffic.count(("all_reduce", 1, "shm"), size)
        traffic.ended("all_reduce", 0.5, False, size)
        traffic.handed_s["all_reduce", 1, "shm"] += 0.25
    return traffic.snapshot()


def test_counts_add_up_by_operation_peer_and_transport():
    traffic = Traffic()
    for place in (("send", 1, "shm"), ("send", 1, "tcp"), ("send", 2, "shm"), ("send", 1, "shm")):
        traffic.count(place, 10)
    traffic.ended("send", 2.0, False, 40)
    traffic.handed_s["send", 1, "shm"] += 1.5
    traffic.ended("send", 1.0, True, 2)
    assert traffic.snapshot() == Snapshot(
        sent=(
            Sent(op="send", peer=1, transport="shm", size_bytes=20, messages=2, seconds=1.5),
            Sent(op="send", peer=1, transport="tcp", size_bytes=10, messages=1),
            Sent(op="send", peer=2, transport="shm", size_bytes=10, messages=1),
        ),
        called=(Called(op="send", calls=2, failed=1, seconds=3.0, predicted_bytes=42),),
    )
    assert traffic.snapshot().size_bytes == traffic.sent_bytes == 40


def test_a_difference_is_what_came_in_between():
    assert counted(8, 16, 4) - counted(8) == counted(16, 4)
    assert counted(8) + counted(16, 4) == counted(8, 16, 4)
    assert counted(8) - counted(8) == Snapshot()


def test_it_survives_json():
    assert Snapshot.from_dict(json.loads(json.dumps(counted(1, 2).to_dict()))) == counted(1, 2)


def test_a_group_says_what_went_out_and_how_long_it_took(tmp_path):
    def work(rank: int):
        dist.barrier()
        before = dist.group.WORLD.traffic
        if rank == 1:
            time.sleep(0.3)
        dist.all_reduce(torch.ones(100_000))
        dist.barrier()
        return (dist.group.WORLD.traffic - before).to_dict()

    for rank, answer in enumerate(check(run_ranks(tmp_path, 2, work, topology="ring"))):
        found = Snapshot.from_dict(answer)
        reduced = [row for row in found.sent if row.op == "all_reduce"]
        assert [(row.peer, row.size_bytes, row.messages) for row in reduced] == [(1 - rank, 400_000, 2)]
        calls = {row.op: row for row in found.called}
        assert [calls[op].calls for op in ("all_reduce", "barrier")] == [1, 1]
        assert calls["all_reduce"].failed == 0
        # The one that came first waited for the other, and what it had to send waited as long.
        waited = calls["all_reduce"].seconds
        assert waited >= reduced[0].seconds > 0
        assert (waited > 0.25) == (rank == 0)


def test_a_call_that_fails_is_counted_as_one(tmp_path):
    def work(rank: int):
        if rank == 1:
            time.sleep(1.0)
            return []
        with pytest.raises(PeerLost):
            dist.all_reduce(torch.ones(100_000))
        return [[row.calls, row.failed] for row in dist.group.WORLD.traffic.called if row.op == "all_reduce"]

    assert check(run_ranks(tmp_path, 2, work, timeout_s=5))[0] == [[1, 1]]
