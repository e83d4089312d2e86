"""One rank's run through random operations: starts each, waits in an order of its own, compares what came out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm.operations import Members, Operation, pattern, reduce_patterns, tile
from echelon.comm import Options

Look = Callable[[], list[tuple[Tensor, Tensor]]]
"""Pairs of what a rank got and what it should have got; called when all has ended."""


class OnOneGroup:
    """The operations of one group, each as a method: the works it started, and what to compare when they have ended."""

    def __init__(self, group: dist.ProcessGroup, me: int) -> None:
        self.group = group
        self.n = group.size()
        self.me = me
        self._gaps: list[Tensor] = []

    def start(self, op: Operation) -> tuple[list[dist.Work], Look]:
        self._gaps = gaps = []
        works, look = getattr(self, op.kind)(op)
        return works, lambda: [*look(), *((gap, torch.ones_like(gap)) for gap in gaps)]

    # -- tensors

    def pattern(self, op: Operation, rank: int, part: int = 0) -> Tensor:
        return pattern(op.number, rank, op.dtype, part)

    def full(self, op: Operation, rank: int, part: int = 0) -> Tensor:
        return tile(self.pattern(op, rank, part), op.numel)

    def given(self, op: Operation, part: int = 0) -> Tensor:
        return self.place(op, self.full(op, self.me, part))

    def place(self, op: Operation, values: Tensor) -> Tensor:
        """The values in memory of their own; with gaps of ones between them that nobody may touch if it is strided."""
        if not op.strided or values.dtype == torch.float8_e4m3fn:
            return values.clone()
        spread = torch.ones(values.numel(), 2, dtype=values.dtype)
        spread[:, 0] = values
        self._gaps.append(spread[:, 1])
        return spread[:, 0]

    def empty(self, op: Operation) -> Tensor:
        return self.place(op, torch.zeros(op.numel, dtype=op.dtype))

    def reduced(self, op: Operation, part: int = 0) -> Tensor:
        return tile(reduce_patterns([self.pattern(op, rank, part) for rank in range(self.n)], op.reduction), op.numel)

    def asked(self, op: Operation) -> dict[str, Any]:
        return {"op": getattr(dist.ReduceOp, op.reduction.upper()), "group": self.group, "async_op": True}

    def is_root(self, op: Operation) -> bool:
        return self.me == op.root

    # -- collectives

    def all_reduce(self, op: Operation) -> tuple[list[dist.Work], Look]:
        mine = self.given(op)
        work = dist.all_reduce(mine, **self.asked(op))
        return [work], lambda: [(mine, self.reduced(op))]

    def all_reduce_coalesced(self, op: Operation) -> tuple[list[dist.Work], Look]:
        mine = [self.given(op, part) for part in range(3)]
        with dist.distributed_c10d._coalescing_manager(self.group, async_ops=True) as together:
            for tensor in mine:
                dist.all_reduce(tensor, **self.asked(op))
        return together.works, lambda: [(mine[part], self.reduced(op, part)) for part in range(3)]

    def reduce(self, op: Operation) -> tuple[list[dist.Work], Look]:
        mine = self.given(op)
        work = dist.reduce(mine, group_dst=op.root, **self.asked(op))
        return [work], lambda: [(mine, self.reduced(op) if self.is_root(op) else self.full(op, self.me))]

    def broadcast(self, op: Operation) -> tuple[list[dist.Work], Look]:
        mine = self.given(op)
        work = dist.broadcast(mine, group_src=op.root, group=self.group, async_op=True)
        return [work], lambda: [(mine, self.full(op, op.root))]

    def barrier(self, op: Operation) -> tuple[list[dist.Work], Look]:
        return [dist.barrier(group=self.group, async_op=True)], list

    def objects(self, op: Operation) -> tuple[list[dist.Work], Look]:
        """Pickled values of several lengths, with the calls that wait."""
        values = [{"rank": rank, "bytes": "x" * (rank * op.number % 5000)} for rank in range(self.n)]
        rows: list[Any] = [None] * self.n
        dist.all_gather_object(rows, values[self.me], group=self.group)
        one = [values[op.root] if self.is_root(op) else None]
        dist.broadcast_object_list(one, group_src=op.root, group=self.group)
        assert (rows, one) == (values, [values[op.root]])
        return [], list

    def all_gather(self, op: Operation) -> tuple[list[dist.Work], Look]:
        mine, rows = self.given(op), [self.empty(op) for _ in range(self.n)]
        work = dist.all_gather(rows, mine, group=self.group, async_op=True)
        return [work], lambda: [(mine, self.full(op, self.me)), *self._rows(op, rows)]

    def _rows(self, op: Operation, rows: Sequence[Tensor], part: int = 0) -> list[tuple[Tensor, Tensor]]:
        return [(row, self.full(op, rank, part)) for rank, row in enumerate(rows)]

    def all_gather_single(self, op: Operation) -> tuple[list[dist.Work], Look]:
        """In place: what this rank gives already lies in the output."""
        whole = torch.zeros(self.n, op.numel, dtype=op.dtype)
        whole[self.me] = self.full(op, self.me)
        work = dist.all_gather_into_tensor(whole.view(-1), whole[self.me], group=self.group, async_op=True)
        return [work], lambda: self._rows(op, list(whole))

    def all_gather_coalesced(self, op: Operation) -> tuple[list[dist.Work], Look]:
        mine = [self.given(op, part) for part in range(2)]
        wholes = [torch.zeros(self.n * op.numel, dtype=op.dtype) for _ in mine]
        with dist.distributed_c10d._coalescing_manager(self.group, async_ops=True) as together:
            for whole, tensor in zip(wholes, mine, strict=True):
                dist.all_gather_into_tensor(whole, tensor.contiguous(), group=self.group, async_op=True)
        return together.works, lambda: [
            pair for part in range(2) for pair in self._rows(op, wholes[part].view(self.n, -1).unbind(), part)
        ]

    def gather(self, op: Operation) -> tuple[list[dist.Work], Look]:
        rows = [self.empty(op) for _ in range(self.n)] if self.is_root(op) else None
        work = dist.gather(self.given(op), rows, group_dst=op.root, group=self.group, async_op=True)
        return [work], lambda: self._rows(op, rows or [])

    def scatter(self, op: Operation) -> tuple[list[dist.Work], Look]:
        out = self.empty(op)
        rows = [self.given(op, rank) for rank in range(self.n)] if self.is_root(op) else None
        work = dist.scatter(out, rows, group_src=op.root, group=self.group, async_op=True)
        return [work], lambda: [(out, self.full(op, op.root, self.me))]

    def reduce_scatter(self, op: Operation) -> tuple[list[dist.Work], Look]:
        out, rows = self.empty(op), [self.given(op, rank) for rank in range(self.n)]
        work = dist.reduce_scatter(out, rows, **self.asked(op))
        left = [(row, self.full(op, self.me, rank)) for rank, row in enumerate(rows)]
        return [work], lambda: [(out, self.reduced(op, self.me)), *left]

    def reduce_scatter_single(self, op: Operation) -> tuple[list[dist.Work], Look]:
        out, whole = self.empty(op).contiguous(), self._whole(op, 0)
        work = dist.reduce_scatter_tensor(out, whole, **self.asked(op))
        return [work], lambda: [(out, self.reduced(op, self.me)), (whole, self._whole(op, 0))]

    def _whole(self, op: Operation, first: int) -> Tensor:
        return torch.cat([self.full(op, self.me, first + rank) for rank in range(self.n)])

    def reduce_scatter_coalesced(self, op: Operation) -> tuple[list[dist.Work], Look]:
        outs = [torch.zeros(op.numel, dtype=op.dtype) for _ in range(2)]
        with dist.distributed_c10d._coalescing_manager(self.group, async_ops=True) as together:
            for part, out in enumerate(outs):
                dist.reduce_scatter_tensor(out, self._whole(op, part * self.n), **self.asked(op))
        return together.works, lambda: [
            (out, self.reduced(op, part * self.n + self.me)) for part, out in enumerate(outs)
        ]

    def all_to_all(self, op: Operation) -> tuple[list[dist.Work], Look]:
        """Each pair its own length: rank i gives rank j the first of the j-th, shorter the farther."""
        ins = [self.given(op, j)[: self._length(op, self.me, j)] for j in range(self.n)]
        outs = [self.empty(op)[: self._length(op, i, self.me)] for i in range(self.n)]
        work = dist.all_to_all(outs, ins, group=self.group, async_op=True)
        return [work], lambda: [
            (out, self.full(op, i, self.me)[: self._length(op, i, self.me)]) for i, out in enumerate(outs)
        ]

    def _length(self, op: Operation, source: int, target: int) -> int:
        return op.numel * (1 + (source + 2 * target + op.number) % 4) // 4

    def all_to_all_single(self, op: Operation) -> tuple[list[dist.Work], Look]:
        """Rows of three, so many for each pair."""
        out_rows = [self._length(op, i, self.me) // 3 for i in range(self.n)]
        in_rows = [self._length(op, self.me, j) // 3 for j in range(self.n)]
        whole = torch.cat([self.full(op, self.me, j)[: 3 * rows] for j, rows in enumerate(in_rows)]).view(-1, 3)
        out = torch.zeros(sum(out_rows), 3, dtype=op.dtype)
        work = dist.all_to_all_single(out, whole, out_rows, in_rows, group=self.group, async_op=True)
        return [work], lambda: [
            (part.reshape(-1), self.full(op, i, self.me)[: 3 * out_rows[i]])
            for i, part in enumerate(out.split(out_rows))
        ]

    # -- messages

    def tagged(self, op: Operation) -> tuple[list[dist.Work], Look]:
        """Everybody to the next, three tags that are received in another order."""
        after, before = (self.me + 1) % self.n, (self.me - 1) % self.n
        if self.n == 1:
            return [], list
        tags = [3 * op.number + part for part in range(3)]
        works = [dist.isend(self.given(op, p), group_dst=after, group=self.group, tag=tags[p]) for p in range(3)]
        found = [self.empty(op) for _ in tags]
        works += [dist.irecv(found[p], group_src=before, group=self.group, tag=tags[p]) for p in (2, 0, 1)]
        return works, lambda: [(found[part], self.full(op, before, part)) for part in range(3)]

    def anyone(self, op: Operation) -> tuple[list[dist.Work], Look]:
        """All others to the root, which learns from each receive whose it is."""
        if not self.is_root(op):
            return [dist.isend(self.given(op), group_dst=op.root, group=self.group, tag=3 * op.number)], list
        found = [self.empty(op) for _ in range(self.n - 1)]
        works = [dist.irecv(one, group=self.group, tag=3 * op.number) for one in found]

        def look() -> list[tuple[Tensor, Tensor]]:
            sources = [work._source_rank() for work in works]
            assert sorted(sources) == [rank for rank in range(self.n) if rank != self.me]
            return [(one, self.full(op, source)) for one, source in zip(found, sources, strict=True)]

        return works, look

    def batch(self, op: Operation) -> tuple[list[dist.Work], Look]:
        """Everybody to everybody else in one batch."""
        others = [rank for rank in range(self.n) if rank != self.me]
        found = {rank: self.empty(op) for rank in others}
        asked = [
            dist.P2POp(call, tensors[rank], group=self.group, tag=3 * op.number, group_peer=rank)
            for rank in others
            for call, tensors in ((dist.irecv, found), (dist.isend, {rank: self.given(op, rank) for rank in others}))
        ]
        works = dist.batch_isend_irecv(asked) if asked else []
        return works, lambda: [(found[rank], self.full(op, rank, self.me)) for rank in others]


def make_groups(groups: Sequence[Members], rank: int) -> dict[int, OnOneGroup]:
    """Of the groups, those this rank belongs to."""
    made = [dist.new_group(list(one.ranks), pg_options=Options(topology=one.topology)) for one in groups]
    return {
        place: OnOneGroup(made[place], one.ranks.index(rank)) for place, one in enumerate(groups) if rank in one.ranks
    }


def run_operations(groups: Sequence[Members], operations: Sequence[Operation], seed: int) -> int:
    """Run those this rank takes part in, up to eight at a time, ended in an order of its own; how many there were."""
    rank = dist.get_rank()
    mine = make_groups(groups, rank)
    dice = random.Random(f"{seed} of rank {rank}")
    under_way: list[tuple[Operation, list[dist.Work], Look]] = []
    ran = 0

    def end(place: int) -> None:
        op, works, look = under_way.pop(place)
        dice.shuffle(works_left := list(works))
        for work in works_left:
            if dice.random() < 0.25:
                work.get_future().wait()
            work.wait()
        for got, expected in look():
            assert got.dtype == expected.dtype
            assert torch.equal(_bits(got), _bits(expected)), f"{op} of {groups[op.group]}"

    for op in operations:
        if op.group not in mine:
            continue
        if dice.random() < 0.1:
            time.sleep(dice.uniform(0, 0.003))  # behind the others, whose frames come before the call
        under_way.append((op, *mine[op.group].start(op)))
        ran += 1
        while len(under_way) > dice.randrange(8):
            end(dice.randrange(len(under_way)))
    while under_way:
        end(dice.randrange(len(under_way)))
    return ran


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
