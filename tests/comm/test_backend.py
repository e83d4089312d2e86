"""The backend on real processes: thousands of random calls against what they should give, faults, rebuilding."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.ranks import check, run_ranks
from echelon.errors import OutOfStep, PeerLost

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
SIZES = [0, 1, 3, 17, 1000, 16_384, 70_000, 300_000]


def given(rank: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings into call `number`: small integers, whose sums every type holds exactly."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, 9, (size,), generator=generator).to(dtype)


class Calls:
    """One rank's side of a random program that every rank of the group draws alike."""

    def __init__(self, group: dist.ProcessGroup | None, members: list[int], dice: random.Random) -> None:
        self.group = group
        self.members = members
        self.n = len(members)
        self.me = members.index(dist.get_rank())
        self.dice = dice

    def one(self, number: int):
        """Start a random call; its work and how to check it."""
        kind = self.dice.choice([name for name in dir(self) if name.startswith("do_")])
        size, dtype = self.dice.choice(SIZES), self.dice.choice(DTYPES)
        inputs = [given(member, number, size, dtype) for member in self.members]
        work, look = getattr(self, kind)(inputs, self.dice.randrange(self.n))

        def verify() -> None:
            for got, expected in look():
                assert torch.equal(got, expected), (kind, number, size, dtype, self.members)

        return work, verify

    def do_all_reduce(self, inputs, root):
        mine = inputs[self.me].clone()
        work = dist.all_reduce(mine, group=self.group, async_op=True)
        return work, lambda: [(mine, sum(inputs[1:], inputs[0].clone()))]

    def do_maximum(self, inputs, root):
        mine = inputs[self.me].clone()
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return work, lambda: [(mine, torch.stack(inputs).amax(0) if mine.numel() else mine)]

    def do_transposed(self, inputs, root):
        mine = inputs[self.me].repeat(2, 1).t()
        work = dist.all_reduce(mine, group=self.group, async_op=True)
        return work, lambda: [(mine, sum(inputs[1:], inputs[0].clone()).repeat(2, 1).t())]

    def do_broadcast(self, inputs, root):
        mine = inputs[self.me].clone()
        work = dist.broadcast(mine, group_src=root, group=self.group, async_op=True)
        return work, lambda: [(mine, inputs[root])]

    def do_reduce(self, inputs, root):
        mine = inputs[self.me].clone()
        work = dist.reduce(mine, group_dst=root, group=self.group, async_op=True)
        expected = sum(inputs[1:], inputs[0].clone()) if self.me == root else inputs[self.me]
        return work, lambda: [(mine, expected)]

    def do_all_gather(self, inputs, root):
        rows = [torch.empty_like(one) for one in inputs]
        work = dist.all_gather(rows, inputs[self.me], group=self.group, async_op=True)
        return work, lambda: list(zip(rows, inputs, strict=True))

    def do_gather(self, inputs, root):
        rows = [torch.empty_like(one) for one in inputs] if self.me == root else None
        work = dist.gather(inputs[self.me], rows, group_dst=root, group=self.group, async_op=True)
        return work, lambda: list(zip(rows, inputs, strict=True)) if rows else []

    def do_scatter(self, inputs, root):
        out = torch.empty_like(inputs[0])
        rows = [inputs[root] + place for place in range(self.n)]
        work = dist.scatter(out, rows if self.me == root else None, group_src=root, group=self.group, async_op=True)
        return work, lambda: [(out, rows[self.me])]

    def do_reduce_scatter(self, inputs, root):
        wholes = [torch.cat([one + place for place in range(self.n)]) for one in inputs]
        kept = wholes[self.me].clone()
        out = torch.empty_like(inputs[0])
        work = dist.reduce_scatter_tensor(out, wholes[self.me], group=self.group, async_op=True)
        expected = sum((one + self.me for one in inputs[1:]), inputs[0] + self.me)
        return work, lambda: [(out, expected), (wholes[self.me], kept)]

    def do_all_to_all(self, inputs, root):
        sizes = [[(i + 2 * j + len(inputs[0])) % 5 for j in range(self.n)] for i in range(self.n)]
        whole = torch.cat([torch.full((sizes[self.me][j],), 10.0 * self.me + j) for j in range(self.n)])
        back = [sizes[i][self.me] for i in range(self.n)]
        out = torch.empty(sum(back))
        work = dist.all_to_all_single(out, whole, back, sizes[self.me], group=self.group, async_op=True)
        expected = torch.cat([torch.full((back[i],), 10.0 * i + self.me) for i in range(self.n)])
        return work, lambda: [(out, expected)]

    def do_messages(self, inputs, root):
        """Everybody to the next, two tags in the wrong order."""
        after, before = (self.me + 1) % self.n, (self.me - 1) % self.n
        if self.n == 1:
            return dist.barrier(group=self.group, async_op=True), list
        first, second = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
        out = [inputs[self.me], inputs[self.me] + 1]
        sends = [dist.isend(out[i], group_dst=after, group=self.group, tag=i + 1) for i in range(2)]
        late = dist.irecv(second, group_src=before, group=self.group, tag=2)
        early = dist.irecv(first, group_src=before, group=self.group, tag=1)
        late.wait()

        def look():
            for send in sends:
                send.wait()
            return [(first, inputs[before]), (second, inputs[before] + 1)]

        return early, look

    def do_barrier(self, inputs, root):
        return dist.barrier(group=self.group, async_op=True), list


def stress(seed: int, calls: int):
    def work(rank: int) -> int:
        dice, size = random.Random(seed), dist.get_world_size()
        subsets = [sorted(dice.sample(range(size), dice.randint(1, size))) for _ in range(2)]
        groups = [(dist.new_group(members), members) for members in subsets]
        mine = [Calls(None, list(range(size)), random.Random(seed))]
        mine += [
            Calls(group, members, random.Random(f"{seed}/{members}")) for group, members in groups if rank in members
        ]
        others = random.Random(rank)
        for number in range(0, calls, 4):
            batch = [one.one(number + i) for i in range(4) for one in mine]
            if number % 3 == 0:
                others.shuffle(batch)  # waited for in another order on each rank
            for pending, verify in batch:
                pending.wait()
                verify()
        return 1

    return work


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_give_what_they_should(tmp_path, size, seed):
    check(run_ranks(tmp_path, size, stress(seed, 120)))


def test_large_tensors_of_every_kind(tmp_path):
    def work(rank: int) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
            x = torch.arange(5_000_003).remainder(5).to(dtype)
            dist.all_reduce(x)
            summed = torch.arange(5_000_003).remainder(5) * 3
            assert torch.equal(x, summed.to(dtype))

    check(run_ranks(tmp_path, 3, work))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_half_precision_is_summed_wide_and_rounded_once(tmp_path, dtype, size):
    def work(rank: int) -> None:
        inputs = [torch.randn(10_000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
        x = inputs[rank].clone()
        dist.all_reduce(x)
        orders = [[(owner + step) % size for step in range(size)] for owner in range(size)]
        sums = [sum((inputs[r].float() for r in order[1:]), inputs[order[0]].float()).to(dtype) for order in orders]
        nearest = torch.stack([(x == one) for one in sums]).any(0)
        assert nearest.all()
        rows = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(rows, x)
        assert all(torch.equal(row, x) for row in rows)  # the same bits everywhere

    check(run_ranks(tmp_path, size, work))


def test_a_receive_from_anyone_says_who_it_was(tmp_path):
    def work(rank: int) -> list[int]:
        if rank:
            dist.send(torch.full((100_000,), float(rank)), 0)
            return []
        sources = []
        for _ in range(2):
            x = torch.empty(100_000)
            sources.append(dist.recv(x))
            assert (x == sources[-1]).all()
        return sorted(sources)

    assert check(run_ranks(tmp_path, 3, work))[0] == [1, 2]


def test_sparse_tensors_are_summed(tmp_path):
    def work(rank: int) -> None:
        indices = torch.tensor([[rank, 3]])
        x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (5,))
        dist.all_reduce(x)
        expected = torch.zeros(5)
        expected[0], expected[1] = 1, 1
        expected[3] = 4
        assert torch.equal(x.to_dense(), expected)

    check(run_ranks(tmp_path, 2, work))


def failing(call):
    """What the call raised, and how long it took."""

    def work(rank: int):
        dist.barrier()
        began = time.monotonic()
        try:
            call(rank)
        except (PeerLost, OutOfStep) as error:
            return [type(error).__name__, error.fields, time.monotonic() - began]
        return None

    return work


@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_a_killed_peer_is_named_on_every_survivor_within_a_second(tmp_path, numel):
    def call(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(numel))

    first, dead, last = run_ranks(tmp_path, 3, failing(call))
    assert dead is None
    for kind, fields, seconds in check([first, last]):
        assert (kind, fields["rank"]) == ("PeerLost", 1)
        assert seconds < 1


def test_a_silent_peer_is_named_when_the_timeout_has_passed(tmp_path):
    def call(rank: int) -> None:
        if rank == 1:
            (tmp_path / "silent").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(100_000))

    def wake() -> None:
        time.sleep(4)
        os.kill(int((tmp_path / "silent").read_text()), signal.SIGCONT)

    waking = threading.Thread(target=wake)
    waking.start()
    first, _, last = run_ranks(tmp_path, 3, failing(call), timeout_s=2)
    waking.join(10)
    for kind, fields, seconds in check([first, last]):
        assert (kind, fields["rank"]) == ("PeerLost", 1)
        assert "no sign of life" in fields["during"]
        assert 2 <= seconds < 4


def test_a_peer_that_is_busy_elsewhere_is_told_from_a_silent_one(tmp_path):
    def call(rank: int) -> None:
        if rank == 1:
            time.sleep(3)
        dist.all_reduce(torch.ones(10))

    for answer in check(run_ranks(tmp_path, 3, failing(call), timeout_s=1))[::2]:
        assert answer[0] == "PeerLost"
        assert "rank" in answer[1]
        assert "alive and has not called it" in answer[1]["during"]


DISAGREEMENTS = {
    "shape": lambda rank: dist.all_reduce(torch.ones(101 if rank == 1 else 100)),
    "dtype": lambda rank: dist.all_reduce(torch.ones(100, dtype=torch.int32 if rank == 1 else torch.float32)),
    "reduction": lambda rank: dist.all_reduce(torch.ones(9), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM),
    "call": lambda rank: dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(100)),
    "root": lambda rank: [dist.broadcast(torch.ones(100), 1 if rank == 1 else 0), dist.barrier()],
    "order": lambda rank: [
        dist.broadcast(torch.ones(100), 0) if (rank == 1) == (turn == 0) else dist.all_reduce(torch.ones(100))
        for turn in range(2)
    ],
    "size": lambda rank: dist.all_reduce(torch.ones(1_000_000 if rank == 1 else 10)),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_call_something_else_are_told_who_called_what(tmp_path, what):
    answers = check(run_ranks(tmp_path, 3, failing(DISAGREEMENTS[what])))
    assert [answer[0] for answer in answers] == ["OutOfStep"] * 3
    for _, fields, seconds in answers:
        assert 1 in (fields["rank"], fields["other"])
        assert seconds < 5


@pytest.mark.parametrize("end", ["destroy_process_group", "_abort_process_group"])
def test_nobody_waits_for_what_a_group_had_to_do_when_it_was_given_up(tmp_path, end):
    def work(rank: int):
        dist.barrier()
        if rank == 1:
            time.sleep(1)
            return "waited elsewhere"
        future = dist.all_reduce(torch.ones(1_000_000), async_op=True).get_future()
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        getattr(dist.distributed_c10d, end)()
        assert ended.wait(1)
        with pytest.raises(Exception, match="was lost during"):
            future.wait()
        return "told"

    assert check(run_ranks(tmp_path, 2, work)) == ["told", "waited elsewhere"]


@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_a_message_to_the_dead_is_not_taken_for_sent(tmp_path, numel):
    def call(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.6)  # until the thread has looked around
        dist.send(torch.ones(numel), 1)

    (answer, dead) = run_ranks(tmp_path, 2, failing(call))
    assert dead is None
    (kind, fields, _) = check([answer])[0]
    assert (kind, fields["rank"]) == ("PeerLost", 1)


def test_after_a_death_the_group_is_aborted_and_a_new_one_made_in_the_same_processes(tmp_path):
    def work(rank: int):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            dist.all_reduce(torch.ones(1000))
        began = time.monotonic()
        dist.distributed_c10d._abort_process_group()
        place = {0: 0, 2: 1}[rank]
        store = dist.FileStore(str(tmp_path / "again"), 2)
        dist.init_process_group("echelon", store=store, rank=place, world_size=2)
        x = torch.ones(5)
        dist.all_reduce(x)
        assert (x == 2).all()
        return time.monotonic() - began

    first, dead, last = run_ranks(tmp_path, 3, work)
    assert dead is None
    assert max(check([first, last])) < 2


def test_hundreds_of_groups_leave_no_thread_descriptor_or_mapping(tmp_path):
    def count() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("memfd:echelon")  # noqa: PTH208

    def work(rank: int):
        dist.destroy_process_group()
        seen = []
        for turn in range(100):
            store = dist.FileStore(str(tmp_path / f"turn-{turn}"), 2)
            dist.init_process_group("echelon", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
            x = torch.ones(1000)
            dist.all_reduce(x)
            assert (x == 2).all()
            dist.destroy_process_group()
            del store
            seen.append(count())
        assert seen[-1] == seen[9], seen[::10]

    check(run_ranks(tmp_path, 2, work))
