"""Who waits is woken: by a frame, by another thread that moved what it waits for, and not by a look at the clock."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from comm.ranks import check, run_ranks
from comm.test_interfaces import apart, hosts_module, needs_hosts  # noqa: F401 (one is a fixture)
from echelon.comm import drive, operation

PLACES = pytest.mark.parametrize("on_each", [1, 2], ids=["over sockets", "through shared memory"])


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Nobody looks around by himself: a wake-up that is lost ends with the timeout of the group, which is an error."""
    for name in ("BACKSTOP_S", "IDLE_S"):
        monkeypatch.setattr(drive, name, 60.0)
    monkeypatch.setattr(operation, "ASK_S", 60.0)


@pytest.mark.parametrize("topology", ["direct", "ring", "star"])
@pytest.mark.parametrize("numel", [100, 20_000])
def test_no_wake_up_is_lost_between_the_thread_and_who_waits(tmp_path, topology, numel):
    def work(rank):
        chance = random.Random(rank)
        tensor = torch.ones(numel)
        for _ in range(100):
            time.sleep(chance.random() * 0.003)
            pending = dist.all_reduce(tensor.fill_(1.0), async_op=True)
            time.sleep(chance.random() * 0.003)
            pending.wait()
        return tensor.tolist() == [3.0] * numel

    assert check(run_ranks(tmp_path, 3, work, topology=topology, timeout_s=10)) == [True] * 3


def many_at_once(rank: int) -> bool:
    """Twelve calls that are begun together and waited for later, by ranks that are not always at the same point."""
    tensors = [torch.ones(131_072) for _ in range(12)]
    for turn in range(10):
        dist.barrier()
        pending = [dist.all_reduce(tensor.fill_(1.0), async_op=True) for tensor in tensors]
        time.sleep(0.002 * (turn % 3) * rank)
        for one in pending:
            one.wait()
    return all(bool((tensor == 2).all()) for tensor in tensors)


@needs_hosts
def test_calls_in_the_background_never_stall_on_a_slow_link(tmp_path, apart):  # noqa: F811
    with hosts_module.two_hosts() as hosts:
        hosts.shape("209mbit")
        apart(hosts)
        assert check(run_ranks(tmp_path, 2, many_at_once, timeout_s=10)) == [True] * 2


@PLACES
def test_calls_begun_in_the_background_and_waited_for_later_never_stall(tmp_path, spread, on_each):
    spread(on_each)
    assert check(run_ranks(tmp_path, 2, many_at_once, timeout_s=10)) == [True] * 2


@PLACES
def test_threads_that_wait_for_different_calls_never_stall_each_other(tmp_path, spread, on_each):
    spread(on_each)

    def work(_rank):
        groups = [dist.new_group() for _ in range(4)]
        errors = []

        def call(group: dist.ProcessGroup) -> None:
            try:
                for _ in range(60):
                    dist.all_reduce(torch.ones(50_000), group=group)
            except Exception as error:  # noqa: BLE001 (told by the rank)
                errors.append(repr(error))

        threads = [threading.Thread(target=call, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        return errors

    assert check(run_ranks(tmp_path, 2, work, timeout_s=10)) == [[]] * 2
