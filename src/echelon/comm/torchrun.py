"""What torchrun says to the workers that it starts again: it gives them the store of the dead, with all their words.

A program of somebody else's has no entry of ours to hand this down from, so it is read here from the environment, where
torch itself looks for it.
"""

from __future__ import annotations

import os

import torch.distributed as dist


def of_this_attempt(store: dist.Store) -> dist.Store:
    """A place in the store in which nobody has said anything yet.

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
