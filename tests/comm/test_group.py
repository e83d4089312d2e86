"""A group of real processes: what one rank has, all have; whatever its type, its layout and its length."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import echelon.comm.group
from echelon.comm import Group, Meeting, join, leave
from echelon.comm.communicator import given_up_by
from echelon.comm.group import transport_errors
from echelon.errors import ConfigError, PeerLost
from echelon.fleet import Start, launch

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint8, torch.bool),
)
CPU = torch.device("cpu")


@pytest.fixture(params=["echelon", "gloo"])
def together(request):
    """Calls a function with the group on every worker; what it returned, by rank. Whatever carries the bytes."""

    def call(function, workers=2):
        def work(start):
            meeting = Meeting(
                rank=start.rank, size=workers, host="127.0.0.1", port=start.store_port, listen_fd=start.store_fd
            )
            start.tether.send({"kind": "ready"})
            found = function(join(meeting, CPU, request.param))
            leave()
            start.tether.send({"kind": "done", "found": found})
            return 0

        return [said["found"] for said in launch(Start(entry=work, workers=workers), lambda event: None)]

    return call


@pytest.fixture
def soon(monkeypatch):
    """Waits look around after a fifth of a second."""
    monkeypatch.setattr(echelon.comm.group, "ENTRY_S", 0.05)
    monkeypatch.setattr(echelon.comm.group, "NOTICE_S", 0.2)


def layouts(value):
    """The same twelve numbers as tensors of every layout that a parameter may have."""
    base = torch.arange(24).remainder(2).reshape(2, 3, 4) + value
    return {
        "whole": base.clone(),
        "transposed": base.clone().transpose(0, 2),
        "every other": base.clone()[:, :, ::2],
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 3),
    }


def test_what_the_root_has_all_have_in_every_type_and_layout(together):
    def work(group):
        wrong = []
        for kind in TYPES:
            expected = layouts(1)
            for name, tensor in layouts(group.rank).items():
                given = tensor.to(kind)
                group.broadcast(given, "a test", root=1)
                if given.tolist() != expected[name].to(kind).tolist():
                    wrong.append(f"{kind} {name}")
        return wrong, group.meter.read().size_bytes, group.meter.begun_bytes

    (wrong_0, sent_0, begun_0), (wrong_1, sent_1, begun_1) = together(work)
    assert wrong_0 == wrong_1 == []
    elements = sum(tensor.numel() for tensor in layouts(1).values())
    lost_by_rounding = elements * sum(kind.itemsize for kind in TYPES) - sent_0 - sent_1
    assert sent_0 + sent_1 == begun_0 + begun_1
    assert 0 <= lost_by_rounding <= len(TYPES) * len(layouts(1)), "a ring's share of an odd number of bytes is no whole"


def test_values_of_any_length_are_gathered_by_rank(together):
    found = together(lambda group: group.gather({"rank": group.rank, "text": "é" * group.rank * 1000}, "a test"), 3)
    assert found == [[{"rank": rank, "text": "é" * rank * 1000} for rank in range(3)]] * 3


def test_sums_are_started_now_and_waited_for_later_and_their_bytes_are_counted(together):
    def work(group):
        first, second = torch.full((6,), 1.0 + group.rank), torch.full((2,), 10.0)
        pending = [group.sum(first, "one"), group.sum(second, "two")]
        for one in pending:
            one.wait()
        return first.tolist(), second.tolist(), group.meter.read().size_bytes, group.meter.begun_bytes

    sums, others, sent, begun = zip(*together(work, 3), strict=True)
    assert (sums, others) == (([6.0] * 6,) * 3, ([30.0] * 2,) * 3)
    # Whoever carries it, (n - 1) / n of a tensor travels twice for each rank; a ring in whole bytes.
    assert sum(sent) == sum(begun) in (2 * 2 * (24 + 8), 3 * (32 + 10))


def test_a_rank_alone_sends_nothing():
    group = Group(None, CPU)
    tensor = torch.ones(3)
    group.sum(tensor, "a test").wait()
    group.broadcast(tensor, "a test")
    assert group.gather({"a": 1}, "a test") == [{"a": 1}]
    assert (tensor.tolist(), group.meter.read().size_bytes) == ([1.0] * 3, 0)


@pytest.mark.parametrize("together", ["echelon"], indirect=True)
def test_a_rank_that_stands_still_is_named_also_if_it_is_the_first(together, soon):
    def work(group):
        said = []
        group.notify = said.append
        pids = group.gather(os.getpid(), "saying who is who")
        if group.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        if group.rank == 2:
            threading.Timer(2.5, os.kill, (pids[0], signal.SIGCONT)).start()
        tensor = torch.ones(2)
        group.sum(tensor, "the sum of a test").wait()
        return tensor.tolist(), said

    (_, said_0), (_, said_1), (_, said_2) = together(work, 3)
    assert not said_0
    assert not said_2
    assert said_1[0].startswith("rank 0 has not come to the sum of a test for ")


def test_a_rank_that_comes_late_is_named_and_the_sum_still_arrives(together, soon):
    def work(group):
        said = []
        group.notify = said.append
        if group.rank == 1:
            time.sleep(2.0)
        tensor = torch.ones(2)
        group.sum(tensor, "the sum of a test").wait()
        return tensor.tolist(), said

    (sum_0, said_0), (sum_1, said_1), (sum_2, said_2) = together(work, 3)
    assert sum_0 == sum_1 == sum_2 == [3.0, 3.0]
    assert not said_1
    assert not said_2, "the first of those that wait speaks for all"
    assert said_0[-1].startswith("rank 1 has not come to the sum of a test for ")


def test_ranks_with_different_backends_do_not_wait_for_each_other():
    def work(start):
        meeting = Meeting(rank=start.rank, size=2, host="127.0.0.1", port=start.store_port, listen_fd=start.store_fd)
        start.tether.send({"kind": "ready"})
        join(meeting, CPU, ("echelon", "gloo")[start.rank])
        return 0

    with pytest.raises(ConfigError, match="gloo") as caught:
        launch(Start(entry=work, workers=2, grace_s=1), lambda event: None)
    assert "echelon" in str(caught.value)


@pytest.mark.parametrize("spare", [7, 9])
def test_who_may_not_open_enough_files_says_so_and_blames_no_other_rank(spare):
    def work(start):
        meeting = Meeting(rank=start.rank, size=3, host="127.0.0.1", port=start.store_port, listen_fd=start.store_fd)
        start.tether.send({"kind": "ready"})
        if start.rank == 1:
            limit = len(list(Path("/proc/self/fd").iterdir())) + spare
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        join(meeting, CPU)
        return 0

    with pytest.raises(ConfigError, match="ulimit -n"):
        launch(Start(entry=work, workers=3, grace_s=1), lambda event: None)


def test_that_a_rank_has_destroyed_the_group_is_said_of_the_call_that_needed_it():
    with pytest.raises(PeerLost, match=r"during the sum \(it has destroyed the group\)"), transport_errors("the sum"):
        raise given_up_by(1)
