"""A group of ranks that agree: the few collectives the rest of Echelon needs, typed errors, metered bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.meter import Meter, OwnMeter, RingMeter
from echelon.comm.process_group import EchelonGroup
from echelon.comm.roll import Roll
from echelon.comm.work import EchelonWork
from echelon.errors import PeerLost, Timeout

ENTRY_S = 1.0
"""After so long a wait is entered into the roll, for the others to see."""
NOTICE_S = 10.0
"""After so long it looks at who is late, and says so; again after every further so long."""

Notify = Callable[[str], None]


@contextmanager
def transport_errors(during: str) -> Iterator[None]:
    """A transport knows only that its connection broke; the error says during what."""
    try:
        yield
    except PeerLost as error:
        why = error.during.partition(" (")[2]
        raise PeerLost(error.rank, f"{during} ({why}" if why else during) from error
    except RuntimeError as error:
        text = str(error).lower()
        if _is_timeout(error):
            raise Timeout(during, 0.0) from error
        if any(
            sign in text for sign in ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "socket")
        ):
            raise PeerLost(-1, during) from error
        raise


def _is_timeout(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


class Pending:
    """A collective under way; `wait` returns when its result may be read."""

    def __init__(self, work: dist.Work | None, group: Group, number: int, during: str) -> None:
        self._work = work
        self._group = group
        self._number = number
        self._during = during

    def wait(self) -> None:
        if self._work is None:
            return
        began, late, entered = time.monotonic(), list[int](), False
        while True:
            try:
                with transport_errors(self._during):
                    self._work.wait(timedelta(seconds=NOTICE_S - ENTRY_S if entered else ENTRY_S))
            except Timeout as error:
                waited = time.monotonic() - began
                if self._work.is_completed():  # the transport's own bound
                    raise Timeout(f"{self._during}{_waiting_for(late)}", round(waited)) from error
                if entered:
                    late = self._group.look_for_the_late(self._work, self._number, self._during, waited)
                else:
                    self._group.enter_the_roll(self._work, self._number, self._during)
                entered = True
            else:
                return


def _waiting_for(late: list[int]) -> str:
    return f", waiting for {ranks_in_words(late)}," if late else ""


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Group:
    """The ranks of one job. With one rank nothing is sent and no process group is needed."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, device: torch.device, store: dist.Store | None = None
    ) -> None:
        self._process_group = process_group
        self.device = device
        self.rank = 0 if process_group is None else process_group.rank()
        self.size = 1 if process_group is None else process_group.size()
        self.meter: Meter = (
            OwnMeter(process_group)
            if isinstance(process_group, EchelonGroup)
            else RingMeter(self.size, "none" if process_group is None else process_group.name())
        )
        self.notify: Notify = lambda _message: None
        self._roll = Roll(store, self.rank, self.size) if store is not None else None
        self._started = 0

    def sum(self, tensor: Tensor, during: str) -> Pending:
        """Sum `tensor` over all ranks in place; start now, wait later."""
        if self._process_group is None:
            return self._pending(None, during)
        self.meter.begin("all_reduce", tensor)
        with transport_errors(during):
            # The group's own method: dist.all_reduce adds tens of microseconds of checks, which count at small sizes.
            return self._pending(self._process_group.allreduce([tensor]), during)

    def broadcast(self, tensor: Tensor, during: str, root: int = 0) -> None:
        """Give every rank the tensor of rank `root`: its bytes, so that any type and layout will do."""
        if self._process_group is None or not tensor.numel():
            return
        self.meter.begin("broadcast", tensor)
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        with transport_errors(during):
            flat = plain.reshape(-1).view(torch.uint8)
            work = dist.broadcast(flat, group_src=root, group=self._process_group, async_op=True)
        self._pending(work, during).wait()
        if self.rank != root and plain.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(plain)

    def enter_the_roll(self, work: dist.Work, number: int, during: str) -> None:
        """Let the others see for what this rank waits, where nobody can ask it."""
        if self._roll is not None and not isinstance(work, EchelonWork):
            self._roll.enter(number, during)

    def look_for_the_late(self, work: dist.Work, number: int, during: str, waited_s: float) -> list[int]:
        """Which ranks a long wait is for, as far as they can be told; says so, from one of those that wait."""
        if isinstance(work, EchelonWork):
            with transport_errors(during):
                late = work.late()
            first = self.rank == min(set(range(self.size)) - set(late))
        elif self._roll is not None:
            late, first = self._roll.call(number, during)
        else:
            return []
        if late and first:
            self.notify(f"{ranks_in_words(late)} has not come to {during} for {waited_s:.0f} s; the others wait for it")
        return late

    def _pending(self, work: dist.Work | None, during: str) -> Pending:
        self._started += 1
        return Pending(work, self, self._started, during)

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
        return [json.loads(row[: int(n)].numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]

    def _all_gather(self, tensor: Tensor, during: str) -> list[Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        self.meter.begin("all_gather", tensor)
        with transport_errors(during):
            work = dist.all_gather(rows, tensor, group=self._process_group, async_op=True)
        self._pending(work, during).wait()
        return rows
