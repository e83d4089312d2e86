"""A rank is killed, the others make a new group with a fresh process in its place: over and over; nothing stays."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.held import what_is_held
from comm.ranks import answer_of, check, end, start
from echelon.errors import PeerLost, Timeout

MOMENTS = ("joining", "small", "large", "between", "message")
JOIN_S = 2.0
"""The bound of a group whose victim dies while it joins: the others wait for so long."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One group that loses a rank: which, when, after how long, and how the others leave it."""

    number: int
    victim: int
    moment: str
    delay_s: float
    leaves_by: str

    def timeout(self) -> timedelta:
        return timedelta(seconds=JOIN_S if self.moment == "joining" else 30)


def draw_cycles(seed: int, ranks: int, count: int) -> list[Cycle]:
    """Every moment in turn, everything else by the seed."""
    dice = random.Random(seed)
    return [
        Cycle(
            number=number,
            victim=dice.randrange(ranks),
            moment=MOMENTS[number % len(MOMENTS)],
            delay_s=dice.uniform(0, 0.015 if MOMENTS[number % len(MOMENTS)] == "joining" else 0.03),
            leaves_by=dice.choice(["destroy_process_group", "_abort_process_group"]),
        )
        for number in range(count)
    ]


def join(folder: Path, cycle: Cycle, rank: int, ranks: int) -> None:
    store = dist.FileStore(str(folder / f"store-{cycle.number}"), ranks)
    dist.init_process_group("echelon", store=store, rank=rank, world_size=ranks, timeout=cycle.timeout())


def call_until_it_fails(cycle: Cycle, rank: int, ranks: int) -> None:
    """Sums that are right, until somebody is gone."""
    numel = 3_000_000 if cycle.moment == "large" else 100
    for turn in range(1_000_000):
        x = torch.full((numel,), float(rank + turn))
        dist.all_reduce(x)
        assert (x == ranks * turn + ranks * (ranks - 1) // 2).all()
        if cycle.moment == "between":
            time.sleep(0.002)
        if cycle.moment == "message":
            sending = dist.isend(x, (rank + 1) % ranks, tag=turn)
            y = torch.empty_like(x)
            dist.recv(y, (rank - 1) % ranks, tag=turn)
            sending.wait()
            assert torch.equal(x, y)


def fall(folder: Path, cycle: Cycle, ranks: int) -> None:
    if cycle.moment == "joining":
        die_in(cycle.delay_s)
    join(folder, cycle, cycle.victim, ranks)
    if cycle.moment != "joining":
        die_in(cycle.delay_s)
    call_until_it_fails(cycle, cycle.victim, ranks)


def die_in(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def survive(folder: Path, cycle: Cycle, place: int, ranks: int) -> None:
    rank = [rank for rank in range(ranks) if rank != cycle.victim][place]
    lost: Exception | None = None
    try:
        join(folder, cycle, rank, ranks)
        call_until_it_fails(cycle, rank, ranks)
    except (PeerLost, Timeout, dist.DistError) as error:
        lost = error
    if cycle.moment != "joining":
        assert isinstance(lost, PeerLost), lost
        assert lost.rank == cycle.victim, lost
    if dist.is_initialized():
        getattr(dist.distributed_c10d, cycle.leaves_by)()


def outlive(folder: Path, cycles: list[Cycle], place: int, ranks: int) -> int:
    """Every cycle but the last loses its victim; what is held afterwards is what was held when all moments had been."""
    held: dict[str, Any] = {}
    for cycle in cycles[:-1]:
        survive(folder, cycle, place, ranks)
        if cycle.number == len(MOMENTS) - 1:
            held = what_is_held()
    stay(folder, cycles[-1], place, ranks)
    assert what_is_held() == held
    return len(cycles)


def stay(folder: Path, cycle: Cycle, rank: int, ranks: int) -> None:
    """The last group, which nobody leaves before its end."""
    join(folder, cycle, rank, ranks)
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x)
    assert (x == ranks * (ranks - 1) / 2).all()
    dist.all_reduce(x)  # not a barrier: where there is a GPU, torch opens it for one
    dist.destroy_process_group()


def rebuild(folder: Path, seed: int, ranks: int, count: int, limit_s: float) -> list[Any]:
    """Survivors live through all cycles; every victim is a fresh process."""
    cycles = draw_cycles(seed, ranks, count + 1)
    deadline = time.monotonic() + limit_s
    names = [f"survivor {place}" for place in range(ranks - 1)]
    alive = {
        start(folder, name, partial(outlive, folder, cycles, place, ranks)): name for place, name in enumerate(names)
    }
    try:
        for cycle in cycles:
            is_last = cycle is cycles[-1]
            name = f"victim {cycle.number}"
            work = partial(stay, folder, cycle, ranks - 1, ranks) if is_last else partial(fall, folder, cycle, ranks)
            victim = start(folder, name, work)
            alive[victim] = name
            while victim in alive or (is_last and alive):
                assert time.monotonic() < deadline, f"{sorted(alive.values())} did not end within {limit_s} s"
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    time.sleep(0.002)
                    continue
                ended = alive.pop(pid)
                died = os.WIFSIGNALED(status) and not is_last and pid == victim
                assert died or is_last, f"{ended} ended in {cycle}: {answer_of(folder, ended)}"
    finally:
        end(alive)
    return check([answer_of(folder, name) for name in names])


@pytest.mark.parametrize("on_each", [3, 1])
def test_a_group_is_made_again_after_every_death_and_nothing_stays(tmp_path, spread, on_each):
    spread(on_each)
    assert rebuild(tmp_path, 1, 3, 10, 100) == [11, 11]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("on_each", "ranks", "seed"), [(4, 3, 2), (4, 4, 3), (1, 3, 4), (2, 4, 5)])
def test_a_group_is_made_again_after_hundreds_of_deaths(tmp_path, spread, on_each, ranks, seed):
    spread(on_each)
    assert rebuild(tmp_path, seed, ranks, 100, 800) == [101] * (ranks - 1)
