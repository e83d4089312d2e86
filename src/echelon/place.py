"""Where one worker is: its rank among how many, its device, its share of this machine's cores."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from echelon.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Place:
    """`cores`: what this process may run on. `forked`: it is a fork of a process that may have used torch's threads
    already.
    """

    rank: int
    workers: int
    local_rank: int
    local_workers: int
    cores: int
    forked: bool = False

    def device(self) -> torch.device:
        """A GPU of its own if there is one, else the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def backend(self, asked: str, device: torch.device) -> str:
        """What torch calls the backend that was asked for. NCCL refuses two ranks on one GPU; gloo then moves their
        tensors through the host.
        """
        if asked == "gloo" and device.type == "cuda" and self.local_workers <= torch.cuda.device_count():
            return "cpu:gloo,cuda:nccl"
        return asked

    def threads(self, exact: bool) -> int:
        """One in exact mode (two change the bits of sums), and in a fork (torch's thread pool does not survive one)."""
        return 1 if exact or self.forked else max(1, self.cores // self.local_workers)


def arithmetic() -> dict[str, Any]:
    """What decides the bits of a floating-point result besides the program."""
    return {
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def check_process() -> None:
    """Refuse a process in which the job's code has set what Echelon sets itself."""
    if dist.is_available() and dist.is_initialized():
        raise own_group()
    device = torch.get_default_device()
    if device.type not in ("cpu", "cuda"):
        why = f"torch's default device was set to {device}, on which nothing can be trained here; leave that out"
        raise ConfigError("set_default_device", why)


def own_group() -> ConfigError:
    """What to say to a job that makes a process group: there cannot be two, and the workers need theirs."""
    why = "was called before training; Echelon makes the process group itself, so leave the call out"
    return ConfigError("init_process_group", why)
