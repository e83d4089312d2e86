"""What ranks say to each other before they have links: words in the store, each waited for with a bound."""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from echelon.errors import Timeout


def of_this_attempt(store: dist.Store) -> dist.Store:
    """torchrun starts workers again with the store of the dead ones and all that they said: a place in it that is new.

    Only where one torchrun has started all workers: others count their attempts differently. And only its own store.
    """
    root = store
    while hasattr(root, "underlying_store"):
        root = root.underlying_store
    said = os.environ.get
    is_shared = said("TORCHELASTIC_USE_AGENT_STORE") == "True" and said("GROUP_WORLD_SIZE") == "1"
    if is_shared and said("MASTER_PORT") == str(getattr(root, "port", None)):
        return dist.PrefixStore(f"attempt {said('TORCHELASTIC_RESTART_COUNT')}", store)
    return store


class Gathering:
    """What every rank says to all others, through the store."""

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: float, timeout_s: float) -> None:
        self.store = store
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
