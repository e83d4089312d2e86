"""Ranks on several hosts: the processes of a test share one, and are told otherwise, so that they meet over TCP."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from comm.ranks import check, run_ranks
from comm.test_backend import stress
from echelon.comm.frame import Call, Header, Kind
from echelon.comm.stream import StreamLink
from echelon.errors import PeerLost


@pytest.mark.parametrize(("size", "on_each"), [(2, 1), (4, 2), (3, 2), (3, 1)])
def test_random_calls_over_several_hosts(tmp_path, spread, size, on_each):
    spread(on_each)
    check(run_ranks(tmp_path, size, stress(7, 80)))


@pytest.mark.parametrize("topology", ["direct", "ring", "tree", "star", "hier"])
def test_random_calls_over_every_topology(tmp_path, spread, topology):
    spread(2)
    check(run_ranks(tmp_path, 4, stress(5, 80), topology=topology))


def test_a_killed_peer_on_another_host_is_named_within_a_second(tmp_path, spread):
    spread(1)

    def work(rank: int):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(1_000_000))
        return [caught.value.rank, time.monotonic() - began]

    first, dead, last = run_ranks(tmp_path, 3, work)
    assert dead is None
    for rank, seconds in check([first, last]):
        assert rank == 1
        assert seconds < 1


def test_bytes_between_hosts_are_those_of_two_single_ranks(tmp_path, spread):
    spread(2)

    def work(rank: int):
        dist.all_reduce(torch.ones(1_000_000))
        return sum(row.size_bytes for row in dist.group.WORLD.traffic.sent if row.transport == "tcp")

    assert check(run_ranks(tmp_path, 4, work)) == [4_000_000, 0, 4_000_000, 0]


@pytest.fixture
def links():
    ends = [socket.socketpair() for _ in range(2)]
    yield StreamLink(1, [one for one, _ in ends], 7), StreamLink(0, [other for _, other in ends], 7), ends
    for one, other in ends:
        one.close()
        other.close()


def frame(number: int, size: int) -> tuple[Header, np.ndarray]:
    payload = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    return Header(Kind.DATA, Call(), 1, number, 0, 0, 0, size), payload


def test_frames_over_several_connections_arrive_whole_and_in_order(links):
    one, other, _ = links
    sizes = [0, 5, 100_000, 1, 250_000, 0, 70_000] * 8
    got = []

    def read() -> None:
        while len(got) < len(sizes):
            found = other.peek()
            if found is None:
                time.sleep(0.0005)
                continue
            header, payload = found
            got.append((header.seq, payload.tobytes()))
            other.pop()

    reader = threading.Thread(target=read)
    reader.start()
    for number, size in enumerate(sizes):
        header, payload = frame(number, size)
        while not one.push(header, payload):
            time.sleep(0.0005)
    while one.unsent:
        one.flush()
    reader.join(20)
    assert got == [(number, frame(number, size)[1].tobytes()) for number, size in enumerate(sizes)]


def test_a_damaged_frame_is_never_applied(links):
    one, other, ends = links
    one.push(*frame(1, 1000))
    raw = bytearray(ends[0][1].recv(5000))
    raw[500] ^= 1
    ends[0][0].send(raw)
    fresh = StreamLink(0, [ends[0][1], ends[1][1]], 7)
    assert fresh.peek() is None
    assert "damaged" in fresh.lost
    assert other.lost is None


def test_a_stranger_s_bytes_are_no_frame(links):
    _, other, ends = links
    ends[0][0].send(b"GET / HTTP/1.1\r\n" * 20)
    assert other.peek() is None
    assert "no frame of this group" in other.lost
