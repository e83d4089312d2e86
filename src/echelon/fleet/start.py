"""What the launcher is asked to start, and what each worker is given at its start: plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.fleet.tether import Tether

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.optim", "torch._dynamo", "safetensors.torch")


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """Handed to the worker function, in the worker's own process.

    Rank 0 alone gets `store_fd`, a bound and listening socket on 127.0.0.1:`store_port`, to host the key-value store on
    (`TCPStore(..., is_master=True, master_listen_fd=store_fd)`); the others connect to `store_port`.
    """

    rank: int
    workers: int
    tether: Tether
    request: dict[str, Any]
    store_port: int
    store_fd: int | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """What `launch` runs: `entry` on each of `workers` processes, with `request` handed to it as it is.

    An `entry` written "module:function" runs in a process forked from a fresh one that has only imported `preload`; a
    callable runs in a fork of the calling process. It returns the exit code of its process, which is 0 after `done`.
    """

    entry: str | Callable[[WorkerStart], int]
    request: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    port: int | None = None
    run: str = ""  # the run folder, for the sentence that says how to go on
    grace_s: float = 60.0  # how long workers that were asked to stop may show no progress until they are killed,
    save_s: float = 600.0  # and how long once they have computed what would be lost
    finish_s: float = 300.0  # from the first worker that is done until those that are not are given up
    preload: tuple[str, ...] = PRELOAD
