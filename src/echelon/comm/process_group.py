"""The `torch.distributed` backend `echelon`: the methods torch asks of a process group, in terms of `Calls`.

torch asks by names that changed between its versions, and with options or with plain arguments; both of 2.11 and 2.13
are understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from echelon.comm.arithmetic import reduction_name
from echelon.comm.calls import Asked, Calls
from echelon.comm.collectives import HostsKey
from echelon.comm.communicator import Communicator
from echelon.comm.drive import Driver
from echelon.comm.gpu import Gpus, routed
from echelon.comm.memory import Memory
from echelon.comm.message import ANYONE
from echelon.comm.named import NamedGroup
from echelon.comm.operation import Operation
from echelon.comm.ring_bytes import ring_bytes
from echelon.comm.sparse import all_reduce_sparse
from echelon.comm.uncompiled import uncompiled
from echelon.comm.work import EchelonWork
from echelon.errors import PeerLost

# mypy: disable-error-code="override"
# What torch's stubs declare is one of several ways in which its own code calls these methods.


@uncompiled
class EchelonGroup(NamedGroup):
    """Some ranks of a fabric, as torch sees them."""

    def __init__(
        self,
        driver: Driver,
        name: str,
        members: Sequence[int],
        host_names: Sequence[str],
        store: dist.Store,
        timeout: timedelta,
        *,
        wanted: str | None = None,
    ) -> None:
        fabric = driver.fabric
        super().__init__(list(members).index(fabric.rank), len(members), name)
        self.driver = driver
        self._wanted = wanted
        self._host_names = [host_names[member] for member in members]
        self._communicator = Communicator(fabric, fabric.ident(name, members), members, timeout.total_seconds())
        self._calls = Calls(driver, self._communicator, _by_host(self._host_names), wanted)
        self.gpus = Gpus(store, self._rank, [fabric.name_of(member) for member in members], timeout, fabric.traffic)
        fabric.add(self._communicator)

    def subgroup(
        self, name: str, members: Sequence[int], store: dist.Store, timeout: timedelta, wanted: str | None = None
    ) -> EchelonGroup:
        """A group of some of these ranks, on the same links."""
        return EchelonGroup(self.driver, name, members, self._host_names, store, timeout, wanted=wanted or self._wanted)

    def cost(self, kind: str, tensor: Tensor) -> int:
        """The bytes that this rank is going to send for a collective of a tensor: known before it runs."""
        if self.gpus.group_for([tensor]) is None:
            return self._calls.cost(kind, tensor)
        return ring_bytes(kind, tensor.nbytes, self._size)

    traffic = property(lambda self: self.driver.fabric.measure(), doc="What this process has sent: a Snapshot.")

    def _asked(self, opts: Any, root: Any = None) -> Asked:
        return _read_options(opts, root, self._communicator.timeout_s)

    def _work(self, operations: Sequence[Operation], result: Any) -> EchelonWork:
        return EchelonWork(self.driver, operations, result)

    @routed
    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        tensors, asked = _as_list(tensors), self._asked(opts)
        if any(tensor.is_sparse for tensor in tensors):
            for tensor in tensors:
                all_reduce_sparse(self._calls, tensor, asked)
            return self._work([], tensors)
        return self._work([self._calls.all_reduce(tensor, asked) for tensor in tensors], tensors)

    @routed
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def barrier(self, opts: Any = None, *_: Any) -> EchelonWork:
        return self._work([self._calls.barrier(self._asked(opts if hasattr(opts, "timeout") else None))], [])

    @routed
    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        tensors = _as_list(tensors)
        asked = self._asked(None, opts) if isinstance(opts, int) else self._asked(opts)
        return self._work([self._calls.broadcast(tensor, asked) for tensor in tensors], tensors)

    @routed
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, *_: Any) -> dist.Work:
        tensors = _as_list(tensors)
        asked = self._asked(op, opts) if isinstance(opts, int) else self._asked(opts)
        return self._work([self._calls.reduce(tensor, asked) for tensor in tensors], tensors)

    @routed
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        asked = self._asked(opts)
        work = [self._gather_rows(row, mine, asked) for row, mine in zip(outputs, inputs, strict=True)]
        return self._work(work, outputs)

    @routed
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        asked = self._asked(opts)
        work = [self._gather_rows([row[i] for row in outputs], mine, asked) for i, mine in enumerate(inputs)]
        return self._work(work, outputs)

    def _gather_rows(self, outputs: Sequence[Tensor], mine: Tensor, asked: Asked) -> Operation:
        results = [Memory(output, filled=False) for output in outputs]
        return self._calls.all_gather([memory.array for memory in results], mine, results, asked)

    @routed
    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        asked = self._asked(opts)
        work = []
        for output, mine in zip(outputs, inputs, strict=True):
            if output.numel() != mine.numel() * self._size:
                raise ValueError(f"the output has {output.numel()} elements, and {self._size} x {mine.numel()} come")
            memory = Memory(output, filled=False)
            work.append(self._calls.all_gather(memory.shares(self._size), mine, [memory], asked))
        return self._work(work, outputs)

    @routed
    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [mine], opts)

    @routed
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        asked = self._asked(None, opts) if isinstance(opts, int) else self._asked(opts)
        rows = outputs[0] if outputs and self._rank == asked.root else []
        return self._work([self._calls.gather(rows, inputs[0], asked)], rows)

    @routed
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        asked = self._asked(None, opts) if isinstance(opts, int) else self._asked(opts)
        rows = inputs[0] if inputs and self._rank == asked.root else []
        return self._work([self._calls.scatter(outputs[0], rows, asked)], outputs)

    @routed
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        asked = self._asked(opts)
        work = [
            self._calls.reduce_scatter(output, [Memory(one).array for one in row], asked)
            for output, row in zip(outputs, inputs, strict=True)
        ]
        return self._work(work, outputs)

    @routed
    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        asked = self._asked(opts)
        work = []
        for output, whole in zip(outputs, inputs, strict=True):
            if whole.numel() != output.numel() * self._size:
                raise ValueError(f"the input has {whole.numel()} elements; {self._size} x {output.numel()} are needed")
            work.append(self._calls.reduce_scatter(output, Memory(whole).shares(self._size), asked))
        return self._work(work, outputs)

    @routed
    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    @routed
    def alltoall_base(
        self, output: Tensor, whole: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        given, taken = Memory(whole), Memory(output, filled=False)
        outs, ins = taken.rows(output_splits, self._size), given.rows(input_splits, self._size)
        return self._work([self._calls.all_to_all(outs, ins, output.dtype, [taken], self._asked(opts))], [output])

    @routed
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        ins, taken = [Memory(one).array for one in inputs], [Memory(one, filled=False) for one in outputs]
        outs = [one.array for one in taken]
        return self._work([self._calls.all_to_all(outs, ins, inputs[0].dtype, taken, self._asked(opts))], outputs)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> EchelonWork:
        return self._work([self._calls.send(tensors[0], peer, tag, self._asked(None))], tensors)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> EchelonWork:
        receiving = self._calls.receive(tensors[0], peer, tag, self._asked(None))
        work = self._work([receiving], tensors)
        work.find_source = lambda: receiving.source
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> EchelonWork:
        return self.recv(tensors, ANYONE, tag)

    # The same by the names of torch 2.13.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def abort(self) -> None:
        """End at once. What is under way here ends with an error; a new group can be made."""
        with self.driver.fabric.lock:
            me = self._communicator.name_of(self._rank)
            self._communicator.fail(PeerLost(me, "abort(), which it called"))
        self.gpus.abort()
        self.shutdown()

    def shutdown(self) -> None:
        """Leave. The last group to go takes the links with it."""
        self.gpus.shutdown()
        if self.driver.leave(self._communicator):
            self.driver.close()


def _read_options(opts: Any, root: Any, timeout_s: float) -> Asked:
    """What options, a reduction or nothing at all say; `timeout_s` and root 0 unless they do."""
    timeout = getattr(opts, "timeout", None)
    reduction = getattr(opts, "reduceOp", None if opts is None or hasattr(opts, "timeout") else opts)
    return Asked(
        timeout_s=timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else timeout_s,
        background=getattr(opts, "asyncOp", True),
        reduction="sum" if reduction is None else reduction_name(reduction),
        root=getattr(opts, "rootRank", 0) if root is None else root,
    )


def _as_list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _by_host(names: Sequence[str]) -> HostsKey:
    """The ranks of each host, in the order of their first."""
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(names):
        hosts.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())
