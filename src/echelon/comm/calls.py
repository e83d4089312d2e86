"""Starting collectives and messages: which topology, which pieces of memory, which call it is to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echelon.comm.arithmetic import Arithmetic, Array, arithmetic_of, numpy_dtype
from echelon.comm.buffer import Buffer, Piece
from echelon.comm.call import ANY_NUMEL, encode_call
from echelon.comm.choose import choose_topology, cut
from echelon.comm.collective import Collective
from echelon.comm.collectives import HostsKey, Shape, pieces_of
from echelon.comm.communicator import Communicator
from echelon.comm.cost import Cost, predict
from echelon.comm.drive import Driver
from echelon.comm.frame import Call
from echelon.comm.memory import Memory, is_same
from echelon.comm.message import ANYONE, Receiving, Sending
from echelon.comm.operation import Operation
from echelon.comm.program import program_of

SMALL_BYTES = 256 << 10
"""A call of at most so much is driven a moment by its caller, also when it is asynchronous."""

LARGEST_TAG = 2**32 - 1
"""What its place in a header holds."""

Pieces = Callable[[int, frozenset[int]], Sequence[Piece]]
"""The pieces of a call, given into how many it is cut and which of them are added to on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a caller says besides the tensors."""

    timeout_s: float
    background: bool = True
    reduction: str = "sum"
    root: int = 0


class Calls:
    """The collectives of one group. `wanted` is the topology to use wherever it can be."""

    def __init__(self, driver: Driver, communicator: Communicator, hosts: HostsKey, wanted: str | None) -> None:
        self.driver = driver
        self.communicator = communicator
        self._hosts = hosts
        self._wanted = wanted
        self._rank = communicator.rank
        self.size = communicator.size

    def _start(
        self,
        kind: str,
        asked: Asked,
        dtype: torch.dtype,
        size_bytes: int,
        pieces: Pieces,
        *,
        numel: int = ANY_NUMEL,
        reduces: bool = False,
        has_root: bool = False,
        results: Sequence[Memory] = (),
    ) -> Operation:
        if has_root:
            _check_member(asked.root, self.size)
        arithmetic: Arithmetic | None = arithmetic_of(dtype, asked.reduction) if reduces else None
        topology = choose_topology(kind, size_bytes, self._hosts, self._wanted)
        root = asked.root if has_root else 0
        shape = Shape(kind=kind, topology=topology, hosts=self._hosts, root=root)
        program = program_of(shape, self._rank)
        call = encode_call(
            kind, topology, dtype, asked.reduction if reduces else None, root if has_root else None, numel
        )
        communicator = self.communicator
        with communicator.fabric.lock:
            communicator.check_failed()
            collective = Collective(
                communicator,
                kind,
                seq=communicator.next_call(),
                call=call,
                program=program,
                buffer=Buffer(
                    pieces(pieces_of(shape), program.summed),
                    arithmetic,
                    numpy_dtype(dtype).itemsize,
                    self._rank,
                    self.size,
                ),
                timeout_s=asked.timeout_s,
            )
            if results:
                collective.before_end(lambda: _give_back(results))
            communicator.begin(collective)
        return self._submit(collective, asked.background, size_bytes)

    def _submit(self, operation: Operation, background: bool, size_bytes: int) -> Operation:
        self.driver.submit(operation, background=background, small=size_bytes <= SMALL_BYTES)
        return operation

    def cost(self, kind: str, tensor: Tensor) -> int:
        """The bytes that this rank is going to send for a collective of such a tensor."""
        return _cost(kind, tensor, self._hosts, self._wanted).size_bytes(self._rank)

    def all_reduce(self, tensor: Tensor, asked: Asked) -> Operation:
        memory = Memory(tensor)
        array = memory.array

        def pieces(count: int, _summed: frozenset[int]) -> list[Piece]:
            return [Piece(stop - start, array[start:stop], array[start:stop]) for start, stop in cut(array.size, count)]

        return self._start(
            "all_reduce", asked, tensor.dtype, tensor.nbytes, pieces, numel=array.size, reduces=True, results=[memory]
        )

    def barrier(self, asked: Asked) -> Operation:
        nothing = np.empty(0, np.uint8)
        return self._start(
            "barrier", asked, torch.uint8, 0, lambda count, _: [Piece(0, nothing, nothing)] * count, numel=0
        )

    def broadcast(self, tensor: Tensor, asked: Asked) -> Operation:
        memory = Memory(tensor, filled=self._rank == asked.root)
        array = memory.array
        return self._start(
            "broadcast", asked, tensor.dtype, tensor.nbytes, lambda *_: [Piece(array.size, array, array)],
            numel=array.size, has_root=True, results=[] if self._rank == asked.root else [memory],
        )  # fmt: skip

    def reduce(self, tensor: Tensor, asked: Asked) -> Operation:
        memory = Memory(tensor)
        array = memory.array
        is_root = self._rank == asked.root

        def pieces(_count: int, summed: frozenset[int]) -> list[Piece]:
            return [Piece(array.size, array, np.empty_like(array) if summed and not is_root else array)]

        return self._start(
            "reduce", asked, tensor.dtype, tensor.nbytes, pieces, numel=array.size, reduces=True, has_root=True,
            results=[memory] if is_root else [],
        )  # fmt: skip

    def all_gather(self, rows: Sequence[Array], mine: Tensor, results: Sequence[Memory], asked: Asked) -> Operation:
        """`rows[r]` becomes what rank r gives."""
        _check_rows(rows, self.size)
        given = Memory(mine).array
        if rows[self._rank].size != given.size:
            raise ValueError(f"the place for this rank's {given.size} elements has {rows[self._rank].size}")
        if not is_same(rows[self._rank], given):
            rows[self._rank][:] = given
        return self._start(
            "all_gather", asked, mine.dtype, mine.nbytes, lambda *_: [Piece(row.size, row, row) for row in rows],
            results=results,
        )  # fmt: skip

    def gather(self, outputs: Sequence[Tensor], mine: Tensor, asked: Asked) -> Operation:
        given = Memory(mine).array
        if self._rank == asked.root:
            _check_rows(outputs, self.size)
            results = [Memory(output, filled=False) for output in outputs]
            results[asked.root].array[:] = given
            pieces = [Piece(memory.array.size, memory.array, memory.array) for memory in results]
        else:
            results, pieces = [], [Piece(given.size, given, None)] * self.size
        return self._start("gather", asked, mine.dtype, mine.nbytes, lambda *_: pieces, has_root=True, results=results)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], asked: Asked) -> Operation:
        memory = Memory(output, filled=False)
        if self._rank == asked.root:
            _check_rows(inputs, self.size)
            given = [Memory(one).array for one in inputs]
            memory.array[:] = given[asked.root]
            pieces = [Piece(one.size, one, None) for one in given]
        else:
            pieces = [Piece(memory.array.size, None, memory.array)] * self.size
        return self._start(
            "scatter", asked, output.dtype, output.nbytes, lambda *_: pieces, has_root=True, results=[memory]
        )

    def reduce_scatter(self, output: Tensor, rows: Sequence[Array], asked: Asked) -> Operation:
        """`output` becomes the sum of what all ranks have in the row of this one. The rows are left as they are."""
        _check_rows(rows, self.size)
        memory, rank = Memory(output, filled=False), self._rank
        if rows[rank].size != memory.array.size:
            raise ValueError(f"the output has {memory.array.size} elements; this rank's share has {rows[rank].size}")

        def pieces(_count: int, summed: frozenset[int]) -> list[Piece]:
            aside = [np.empty_like(row) if place in summed else None for place, row in enumerate(rows)]
            aside[rank] = memory.array
            return [Piece(row.size, row, result) for row, result in zip(rows, aside, strict=True)]

        if self.size == 1:
            memory.array[:] = rows[0]
        return self._start("reduce_scatter", asked, output.dtype, output.nbytes, pieces, reduces=True, results=[memory])

    def all_to_all(
        self, outs: Sequence[Array], ins: Sequence[Array], dtype: torch.dtype, results: Sequence[Memory], asked: Asked
    ) -> Operation:
        _check_rows(outs, self.size)
        _check_rows(ins, self.size)
        if outs[self._rank].size != ins[self._rank].size:
            raise ValueError(f"this rank gives itself {ins[self._rank].size} and expects {outs[self._rank].size}")
        outs[self._rank][:] = ins[self._rank]
        pieces = [Piece(one.size, one, None) for one in ins] + [Piece(one.size, None, one) for one in outs]
        size = sum(one.nbytes for one in ins)
        return self._start("all_to_all", asked, dtype, size, lambda *_: pieces, results=results)

    def send(self, tensor: Tensor, peer: int, tag: int, asked: Asked) -> Operation:
        data, call = self._message(tensor, peer, tag, filled=True)
        communicator = self.communicator
        with communicator.fabric.lock:
            communicator.check_failed()
            sending = Sending(communicator, peer, tag, data.array.view(np.uint8), call, asked.timeout_s)
            communicator.mailbox.send(sending)
            communicator.check(sending)
        return self._submit(sending, asked.background, tensor.nbytes)

    def receive(self, tensor: Tensor, peer: int, tag: int, asked: Asked) -> Receiving:
        data, call = self._message(tensor, None if peer == ANYONE else peer, tag, filled=False)
        communicator = self.communicator
        receiving = Receiving(communicator, peer, tag, data.array.view(np.uint8), call, asked.timeout_s)
        receiving.before_end(data.give_back)
        with communicator.fabric.lock:
            communicator.check_failed()
            communicator.mailbox.receive(receiving)
            communicator.check(receiving)
        # Nobody drives it but who waits: what is to come may be the answer to what its caller sends next.
        self.driver.submit(receiving, background=asked.background, small=False)
        return receiving

    def _message(self, tensor: Tensor, peer: int | None, tag: int, *, filled: bool) -> tuple[Memory, Call]:
        if peer is not None:
            _check_member(peer, self.size)
            if peer == self._rank:
                raise ValueError(f"rank {peer} of the group cannot send to itself, nor receive from itself")
        if not 0 <= tag <= LARGEST_TAG:
            raise ValueError(f"tag={tag}: a tag is a number from 0 to {LARGEST_TAG}")
        memory = Memory(tensor, filled=filled)
        return memory, encode_call("send", "direct", tensor.dtype, None, None, memory.array.size)


def _cost(kind: str, tensor: Tensor, hosts: HostsKey, wanted: str | None) -> Cost:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return predict(kind, hosts=hosts, numel=tensor.numel(), itemsize=tensor.itemsize, half=half, topology=wanted)


def _check_member(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is no member of a group of {size}")


def _check_rows(rows: Sequence[Tensor | Array], size: int) -> None:
    if len(rows) != size:
        raise ValueError(f"one tensor for each of the {size} ranks is needed, and there are {len(rows)}")


def _give_back(memories: Sequence[Memory]) -> None:
    for memory in memories:
        memory.give_back()
