"""Who waits is woken: by a frame, by another thread that moved what it waits for, and not by a look at the clock."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from comm.ranks import check, run_ranks
from echelon.comm import drive, operation


@pytest.fixture
def no_clock(monkeypatch):
    """Nobody looks around by himself; a wake-up that is lost is found when the group's timeout has passed."""
    for name in ("BACKSTOP_S", "IDLE_S"):
        monkeypatch.setattr(drive, name, 60.0)
    monkeypatch.setattr(operation, "ASK_S", 60.0)


@pytest.mark.parametrize("topology", ["direct", "ring", "star"])
@pytest.mark.parametrize("numel", [100, 20_000])
def test_no_wake_up_is_lost_between_the_thread_and_who_waits(tmp_path, no_clock, topology, numel):
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
