"""One global norm over all gradients: quickly, or in an order that no sharding can change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 1 << 16


def global_norm(gradients: Mapping[str, Tensor], exact: bool) -> Tensor:
    """The 2-norm over all gradients, as a scalar tensor.

    Exact: squares are summed in float64 over blocks of 64 K elements of each tensor, blocks in order, tensors by name.
    """
    if not gradients:
        return torch.zeros(())
    if not exact:
        norm: Tensor = torch.nn.utils.get_total_norm(list(gradients.values()))
        return norm
    total = torch.zeros((), dtype=torch.float64, device=next(iter(gradients.values())).device)
    for name in sorted(gradients):
        values = gradients[name]
        flat = torch.view_as_real(values).flatten() if values.is_complex() else values.flatten()
        for block in flat.split(BLOCK):
            total += block.double().square().sum()
    return total.sqrt()
