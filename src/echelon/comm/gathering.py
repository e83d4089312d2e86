"""What ranks say to each other before they have links: words in the store, each waited for with a bound."""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from echelon.comm.torchrun import of_this_attempt
from echelon.errors import Timeout


class Gathering:
    """What every rank says to all others, through the store."""

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: float, timeout_s: float) -> None:
        self.store = of_this_attempt(store)
        self.rank = rank
        self.size = size
        self.deadline = deadline
        self.timeout_s = timeout_s

    def left_s(self, waiting_for: int) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Timeout(f"joining the group, waiting for rank {waiting_for},", self.timeout_s)
        return left

    def share(self, what: str, mine: Any) -> list[Any]:
        self.store.set(f"{what}/{self.rank}", json.dumps(mine))
        return [json.loads(self._get(f"{what}/{peer}", peer)) for peer in range(self.size)]

    def secret(self) -> bytes:
        if self.rank == 0:
            self.store.set("secret", secrets.token_hex(32))
        return bytes.fromhex(self._get("secret", 0).decode())

    def _get(self, key: str, peer: int) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=self.left_s(peer)))
        except RuntimeError as error:
            raise Timeout(f"joining the group, waiting for rank {peer},", self.timeout_s) from error
        return bytes(self.store.get(key))
