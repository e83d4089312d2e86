"""Giving up a group: while something is under way in it, from another thread, twice, or hundreds of times."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from comm.held import what_is_held
from comm.ranks import check, run_ranks
from echelon.comm.collective import Collective
from echelon.errors import Bug, OutOfStep, PeerLost

WAYS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "abort": lambda group: group.abort(),
    "shutdown": lambda group: group.shutdown(),
    "_abort_process_group": lambda _group: dist.distributed_c10d._abort_process_group(),
    "destroy_process_group": lambda _group: dist.destroy_process_group(),
}
UNDER_WAY = {
    "a small sum": lambda: dist.all_reduce(torch.ones(10)),
    "a large sum": lambda: dist.all_reduce(torch.ones(1_000_000)),
    "a receive": lambda: dist.recv(torch.ones(10), 1),
    "a large send": lambda: dist.send(torch.ones(1_000_000), 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", UNDER_WAY)
@pytest.mark.parametrize("on_each", [2, 1])
def test_who_waits_is_told_when_another_thread_gives_the_group_up(tmp_path, spread, way, what, on_each):
    spread(on_each)

    def work(rank: int) -> str:
        dist.barrier()
        if rank == 1:
            while not (tmp_path / "ended").exists():
                time.sleep(0.01)
            return "was elsewhere"
        group = dist.group.WORLD
        giving_up = threading.Timer(0.2, WAYS[way], (group,))
        giving_up.start()
        try:
            with pytest.raises(PeerLost):
                UNDER_WAY[what]()
        finally:
            (tmp_path / "ended").touch()
        giving_up.join()
        return "told"

    assert check(run_ranks(tmp_path, 2, work)) == ["told", "was elsewhere"]


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("then", ["abort", "shutdown"])
def test_a_group_that_is_given_up_twice_closes_nothing_of_others(tmp_path, first, then):
    def work(rank: int) -> None:
        dist.barrier()
        group = dist.group.WORLD
        WAYS[first](group)
        mine = [os.open(tmp_path, os.O_RDONLY) for _ in range(20)]
        WAYS[then](group)
        if dist.is_initialized():
            dist.destroy_process_group()
        for fd in mine:
            os.close(fd)

    check(run_ranks(tmp_path, 2, work))


@pytest.mark.parametrize("way", ["destroy_process_group", "_abort_process_group"])
def test_hundreds_of_subgroups_that_were_given_up_leave_nothing(tmp_path, way):
    def work(rank: int) -> None:
        held = None
        for turn in range(200):
            members = [[0, 1], [0, 1, 2], [1, 2], [2, 0]][turn % 4]
            group = dist.new_group(members)
            if rank in members:
                x = torch.ones(30_000)  # large enough for a rank to say that it is ready
                dist.all_reduce(x, group=group)
                assert (x == len(members)).all()
            dist.barrier()
            if rank in members:
                getattr(dist.distributed_c10d, way)(group)
            if turn == 20:
                held = what_is_held()
        dist.barrier()
        assert what_is_held() == held
        fabric = dist.group.WORLD.driver.fabric
        assert len(fabric._communicators) == 1
        assert not fabric._homeless
        assert not fabric.operations

    check(run_ranks(tmp_path, 3, work))


@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_a_message_to_a_group_that_its_receiver_has_destroyed_ends(tmp_path, numel):
    def work(rank: int) -> list[str]:
        group = dist.new_group()
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group(group)
        dist.barrier()
        said = []
        if rank == 0:
            try:
                dist.send(torch.ones(numel), 1, group=group)
            except PeerLost as error:
                said = [f"{error.rank} {error.during}"]
        dist.barrier()
        return said

    sender, _ = check(run_ranks(tmp_path, 2, work, timeout_s=15))
    assert sender == ([] if numel == 10 else ["1 a call (it has destroyed the group)"])


def test_a_bug_in_what_moves_frames_ends_every_call_and_names_itself(tmp_path, monkeypatch):
    def work(rank: int) -> str:
        dist.barrier()
        if rank == 1:
            monkeypatch.setattr(Collective, "take", lambda *_: 1 // 0)
        try:
            for _ in range(3):
                dist.all_reduce(torch.ones(10))
        except (Bug, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    first, second = check(run_ranks(tmp_path, 2, work, timeout_s=15))
    assert first.startswith("Bug: rank 1: ZeroDivisionError")
    assert "ZeroDivisionError" in second


MISMATCHES: dict[str, Callable[[int], object]] = {
    "the sizes of a message": lambda rank: (
        dist.send(torch.ones(11), 1) if rank == 0 else dist.recv(torch.ones(10), 0) if rank == 1 else None
    ),
    "the types of a message": lambda rank: (
        dist.send(torch.ones(10), 1)
        if rank == 0
        else dist.recv(torch.ones(10, dtype=torch.int32), 0)
        if rank == 1
        else None
    ),
    "the rows of an all-to-all": lambda rank: dist.all_to_all_single(
        torch.ones(6 if rank else 7), torch.ones(6), [2, 2 if rank else 3, 2], [2, 2, 2]
    ),
    "the sizes of a gathering": lambda rank: dist.all_gather(
        [torch.ones(4 + rank) for _ in range(3)], torch.ones(4 + rank)
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.parametrize("on_each", [3, 1])
def test_ranks_whose_pieces_do_not_fit_are_told(tmp_path, spread, what, on_each):
    spread(on_each)

    def work(rank: int) -> str:
        try:
            MISMATCHES[what](rank)
            dist.barrier()
        except (OutOfStep, PeerLost) as error:
            return type(error).__name__
        return "nothing was wrong"

    assert check(run_ranks(tmp_path, 3, work, timeout_s=10)) == ["OutOfStep"] * 3
