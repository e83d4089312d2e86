"""Numbers that a GPU has yet to compute, fetched as soon as they are there.

    CPU   queue forward | start copying the loss | queue backward | read the loss | queue update, next forward ...
    GPU   forward ......| copy | backward ..............................................| update | forward ...

Asked for only when it is needed, a loss would arrive after everything queued since then, and the GPU would have
nothing to do while the next step is queued.
"""

from __future__ import annotations

from typing import SupportsFloat

import torch
from torch import Tensor


class Coming:
    """A scalar on its way to the host; `float` waits for it, and not for what was queued on the device after it."""

    def __init__(self, number: Tensor, times: float) -> None:
        self._times = times
        self._host = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._host.copy_(number.reshape(()).double(), non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def __float__(self) -> float:
        self._arrived.synchronize()
        return self._host.item() * self._times


def fetch(number: Tensor, times: float = 1.0) -> SupportsFloat:
    """The number times another, as a double; on a GPU the promise of it."""
    return Coming(number, times) if number.is_cuda else number.item() * times


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, by way of memory that a GPU can read without stopping the queue."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.layout == torch.strided:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
