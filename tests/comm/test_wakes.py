"""Nobody sleeps through what another thread of the process took out of a descriptor, or left to be written."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from comm.ranks import check, run_ranks
from comm.test_interfaces import apart, hosts_module, needs_hosts  # noqa: F401 (one is a fixture)

STALL_S = 0.6
"""Sleeping through a wake-up ends with the backstop, after a second."""


def many_at_once(rank: int) -> float:
    """The longest that twelve calls take which were begun together and are waited for later."""
    tensors = [torch.ones(131_072) for _ in range(12)]
    took = []
    for turn in range(10):
        dist.barrier()
        began = time.monotonic()
        pending = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        time.sleep(0.002 * (turn % 3) * rank)
        for one in pending:
            one.wait()
        took.append(time.monotonic() - began)
    return max(took)


@needs_hosts
def test_calls_in_the_background_never_stall_on_a_slow_link(tmp_path, apart):  # noqa: F811
    with hosts_module.two_hosts() as hosts:
        hosts.shape("209mbit")  # they take a quarter of a second
        apart(hosts)
        assert max(check(run_ranks(tmp_path, 2, many_at_once))) < 0.9


@pytest.mark.parametrize("on_each", [1, 2], ids=["over sockets", "through shared memory"])
def test_calls_begun_in_the_background_and_waited_for_later_never_stall(tmp_path, spread, on_each):
    spread(on_each)

    assert max(check(run_ranks(tmp_path, 2, many_at_once))) < STALL_S


@pytest.mark.parametrize("on_each", [1, 2], ids=["over sockets", "through shared memory"])
def test_threads_that_wait_for_different_calls_never_stall_each_other(tmp_path, spread, on_each):
    spread(on_each)

    def work(rank: int):
        groups = [dist.new_group() for _ in range(4)]
        longest = []

        def drive(group: dist.ProcessGroup) -> None:
            tensor, took = torch.ones(50_000), []
            for _ in range(60):
                began = time.monotonic()
                dist.all_reduce(tensor, group=group)
                took.append(time.monotonic() - began)
            longest.append(max(took))

        threads = [threading.Thread(target=drive, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(longest)

    assert max(check(run_ranks(tmp_path, 2, work))) < STALL_S
