"""Joining the ranks of a job into one group, and leaving it."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.comm.backend import NAME, Options
from echelon.comm.group import Group, transport_errors
from echelon.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where ranks find each other.

    `listen_fd`: a listening socket that rank 0 serves the store on, if it was given one. `serve`: whether rank 0
    serves the store at all (under torchrun its agent may). `attempt` keeps the traces of an earlier start in the same
    store apart.
    """

    rank: int
    size: int
    host: str
    port: int
    listen_fd: int | None = None
    serve: bool = True
    attempt: str = "0"
    timeout_s: float = 600.0


def join(meeting: Meeting, device: torch.device, backend: str = NAME, topology: str | None = None) -> Group:
    """Meet the other ranks. Alone, there is nobody to meet and no port is opened. `topology` is for our own backend."""
    if meeting.size == 1:
        return Group(None, device)
    store = dist.PrefixStore(f"echelon/{meeting.attempt}", _store(meeting))
    with transport_errors("joining the group"):
        _check_backend(store, backend)
        dist.init_process_group(
            backend,
            store=store,
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=timedelta(seconds=meeting.timeout_s),
            pg_options=Options(topology=topology) if backend == NAME else None,
        )
    return Group(dist.group.WORLD, device, dist.PrefixStore("roll", store))


def _check_backend(store: dist.Store, mine: str) -> None:
    """Ranks with different ones would wait for each other until the bound: the first to come says which it is."""
    theirs = store.compare_set("backend", "", mine).decode()
    if theirs != mine:
        raise ConfigError("backend", f"is {mine} on one rank and {theirs} on another; give all the same --backend")


def _store(meeting: Meeting) -> dist.Store:
    serves = meeting.rank == 0 and meeting.serve
    try:
        return dist.TCPStore(
            meeting.host,
            meeting.port,
            meeting.size,
            is_master=serves,
            timeout=timedelta(seconds=meeting.timeout_s),
            wait_for_workers=False,
            master_listen_fd=meeting.listen_fd if serves else None,
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(
                "port", f"{meeting.port} on {meeting.host} is in use; choose another (MASTER_PORT) or end what uses it"
            ) from error
        raise


def leave() -> None:
    """Drop the group. Tensors and hooks that refer to it must be gone before (a collector run makes sure)."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
