"""What a group of workers sends, whoever carries it: known when a call begins, and read when all is done.

Our own backend counts what it hands to a transport (traffic.py) and knows the bytes of a call before it runs. gloo and
NCCL do not say what they send, so it is counted by the formula of the algorithm they use (ring_bytes.py).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from echelon.comm.process_group import EchelonGroup
from echelon.comm.ring_bytes import ring_bytes
from echelon.comm.traffic import Snapshot, Traffic


class Meter(Protocol):
    """Of one worker."""

    @property
    def begun_bytes(self) -> int:
        """What the calls begun up to now send, also if some of it is still to go."""

    def cost(self, op: str, tensor: Tensor) -> int:
        """What this worker is going to send for a call of that tensor."""

    def begin(self, op: str, tensor: Tensor) -> None:
        """Such a call begins."""

    def read(self) -> Snapshot:
        """What was sent."""


class OwnMeter:
    """The backend counts by itself."""

    def __init__(self, group: EchelonGroup) -> None:
        self._group = group
        self._traffic = group.driver.fabric.traffic
        self._costs: dict[tuple[str, int, object], int] = {}

    @property
    def begun_bytes(self) -> int:
        return self._traffic.begun_bytes

    def cost(self, op: str, tensor: Tensor) -> int:
        key = op, tensor.numel(), tensor.dtype
        if key not in self._costs:
            self._costs[key] = self._group.cost(op, tensor)
        return self._costs[key]

    def begin(self, op: str, tensor: Tensor) -> None:
        pass

    def read(self) -> Snapshot:
        return self._group.driver.fabric.measure()


class RingMeter:
    """By formula, for a backend that says nothing. Nobody is named as the peer: a ring has neighbours we do not see."""

    def __init__(self, ranks: int, transport: str) -> None:
        self._ranks = ranks
        self._transport = transport
        self._traffic = Traffic()

    @property
    def begun_bytes(self) -> int:
        return self._traffic.begun_bytes

    def cost(self, op: str, tensor: Tensor) -> int:
        return ring_bytes(op, tensor.nbytes, self._ranks)

    def begin(self, op: str, tensor: Tensor) -> None:
        self._traffic.by_formula((op, -1, self._transport), self.cost(op, tensor))

    def read(self) -> Snapshot:
        return self._traffic.snapshot()
