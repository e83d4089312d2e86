"""CUDA tensors between ranks that each have a GPU of their own: they go through NCCL, which is made when it is needed.

NCCL refuses two ranks on one GPU. Such a group moves CUDA tensors through the host's memory instead (memory.py), on
the same links as all others. Which of the two it is, the ranks agree on when the first CUDA tensor comes: each says in
the store which GPU it is on. Messages from rank to rank go through the host in either case, since NCCL would deadlock
where two ranks first send to each other and then receive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.ring_bytes import ring_bytes
from echelon.comm.traffic import Traffic
from echelon.errors import Timeout

Make = Callable[[dist.Store, int, int, timedelta], dist.ProcessGroup]
"""Makes a group for CUDA tensors from a store, a rank, a size and a timeout."""


def make_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A torch group whose CUDA tensors go through NCCL."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


class Gpus:
    """Of one group. `names` are its ranks as users know them."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        names: Sequence[int],
        timeout: timedelta,
        traffic: Traffic,
        make: Make | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._timeout = timeout
        self._traffic = traffic
        self._make = make or (make_nccl if dist.is_nccl_available() else None)
        self._agreed = self._make is None
        self._group: dist.ProcessGroup | None = None

    def group_for(self, args: Any) -> dist.ProcessGroup | None:
        """The group that carries the tensors among these arguments; None: it is this one, through the host."""
        tensor = first_tensor(args)
        if tensor is None or tensor.device.type == "cpu":
            return None
        if not self._agreed and self._make is not None:
            if self._each_has_its_own(identity(tensor.device)):
                store = dist.PrefixStore("nccl", self._store)
                self._group = self._make(store, self._rank, len(self._names), self._timeout)
            self._agreed = True
        return self._group

    def _each_has_its_own(self, mine: str) -> bool:
        self._store.set(f"gpu/{self._rank}", mine)
        keys = [f"gpu/{rank}" for rank in range(len(self._names))]
        for name, key in zip(self._names, keys, strict=True):
            try:
                self._store.wait([key], self._timeout)
            except RuntimeError as error:
                during = f"agreeing on how CUDA tensors travel, waiting for rank {name},"
                raise Timeout(during, self._timeout.total_seconds()) from error
        return len({self._store.get(key) for key in keys}) == len(keys)

    def count(self, op: str, args: Any) -> None:
        """The other group is handed a call: its bytes are counted by the formula of a ring."""
        size_bytes = sum(tensor.nbytes for tensor in tensors_in(args[:1]))
        size = len(self._names)
        place = op, self._names[(self._rank + 1) % size], "nccl"
        self._traffic.by_formula(place, ring_bytes(op, size_bytes, size))

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None


def identity(device: torch.device) -> str:
    """What tells one GPU from all others, on whatever host; tensors of the CPU all share one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


class Routes(Protocol):
    """A group that may have another one for some tensors."""

    gpus: Gpus


G = TypeVar("G", bound=Routes)
P = ParamSpec("P")
Method = Callable[Concatenate[G, P], dist.Work]


def routed(method: Method[G, P]) -> Method[G, P]:
    """The method of a group; for tensors that have another group, the method of that name of the other."""

    @functools.wraps(method)
    def call(self: G, /, *args: P.args, **options: P.kwargs) -> dist.Work:
        other = self.gpus.group_for(args)
        if other is None:
            return method(self, *args, **options)
        self.gpus.count(method.__name__, args)
        work: dist.Work = getattr(other, method.__name__)(*args, **options)
        return work

    return call


def tensors_in(args: Any) -> Iterator[Tensor]:
    """The tensors in arguments that are tensors, or lists of them, or lists of lists."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from tensors_in(arg)


def first_tensor(args: Any) -> Tensor | None:
    return next(tensors_in(args), None)
