"""A group of ranks that agree: the few collectives the rest of Echelon needs, typed errors, metered bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.meter import Meter, all_gather_bytes, all_reduce_bytes, broadcast_bytes
from echelon.errors import PeerLost, Timeout


@contextmanager
def transport_errors(during: str) -> Iterator[None]:
    """A transport knows only that its connection broke; the error says during what."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise Timeout(during, 0.0) from error
        if any(
            sign in text for sign in ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "socket")
        ):
            raise PeerLost(-1, during) from error
        raise


class Pending:
    """A collective under way; `wait` returns when its result may be read."""

    def __init__(self, work: dist.Work | None, during: str) -> None:
        self._work = work
        self._during = during

    def wait(self) -> None:
        if self._work is not None:
            with transport_errors(self._during):
                self._work.wait()


class Group:
    """The ranks of one job. With one rank nothing is sent and no process group is needed."""

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._process_group = process_group
        self.device = device
        self.rank = 0 if process_group is None else process_group.rank()
        self.size = 1 if process_group is None else process_group.size()
        self.meter = Meter()

    def cost_of_sum(self, tensor: Tensor) -> int:
        """Bytes this rank will send to sum `tensor`."""
        return all_reduce_bytes(tensor.nbytes, self.size)

    def sum(self, tensor: Tensor, during: str) -> Pending:
        """Sum `tensor` over all ranks in place; start now, wait later."""
        if self._process_group is None:
            return Pending(None, during)
        self.meter.add(self.cost_of_sum(tensor))
        with transport_errors(during):
            # The group's own method: dist.all_reduce adds tens of microseconds of checks, which count at small sizes.
            return Pending(self._process_group.allreduce([tensor]), during)

    def broadcast(self, tensor: Tensor, during: str) -> None:
        """Give every rank the tensor of rank 0."""
        if self._process_group is None:
            return
        if self.rank == 0:
            self.meter.add(broadcast_bytes(tensor.nbytes, self.size))
        with transport_errors(during):
            dist.broadcast(tensor, group_src=0, group=self._process_group)

    def gather(self, value: Any, during: str) -> list[Any]:
        """Every rank's plain value (JSON), by rank, on every rank."""
        if self._process_group is None:
            return [value]
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([payload.numel()], dtype=torch.int64), during)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        rows = self._all_gather(padded, during)
        return [json.loads(row[: int(n)].cpu().numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]

    def _all_gather(self, tensor: Tensor, during: str) -> list[Tensor]:
        mine = tensor.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.meter.add(all_gather_bytes(tensor.nbytes, self.size))
        with transport_errors(during):
            dist.all_gather(rows, mine, group=self._process_group)
        return rows
