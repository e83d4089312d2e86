"""How gradients of slices become one gradient, by the documented rule: exactly on a grid of integers, or plainly.

Written for the reference: no blocks, no buffers, no overlap. A bucket here is a list of names, since the exact rule
rounds the gradients of a bucket onto one grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MIB = 2**20
Gradients = Mapping[str, Tensor]


def buckets(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Names that share a grid: doubles apart, last parameter first, 4 MiB in the first bucket and 25 in the others."""
    found: list[list[str]] = []
    for wide in (True, False):
        filled = 0
        is_open = False
        for name in reversed(list(parameters)):
            parameter = parameters[name]
            if (parameter.dtype in (torch.float64, torch.complex128)) != wide:
                continue
            size = parameter.numel() * (2 if parameter.is_complex() else 1) * (8 if wide else 4)
            limit = 4 * MIB if not found or (len(found) == 1 and is_open) else 25 * MIB
            if is_open and filled + size <= limit:
                found[-1].append(name)
                filled += size
            else:
                found.append([name])
                filled, is_open = size, True
    return found


class ExactSum:
    """The exact mean over slices. Keeps one grid (2**-k) for each bucket from step to step."""

    def __init__(self, parameters: Mapping[str, Tensor], slices: int) -> None:
        self._buckets = buckets(parameters)
        self._slices = slices
        self.k = [40] * len(self._buckets)

    def fit(self, slices: Sequence[Gradients]) -> list[float]:
        """Choose grids that fit these gradients; the largest magnitude in every bucket."""
        tops = [max((_top(s[n]) for s in slices for n in names if n in s), default=0.0) for names in self._buckets]
        for index, top in enumerate(tops):
            if top > 0 and not self._fits(self.k[index], top):
                self.k[index] = _k_for(top)
        return tops

    def _fits(self, k: int, top: float) -> bool:
        bits = math.frexp(top)[1] + k
        room = 53 - math.ceil(math.log2(self._slices))
        return bits <= room and (bits >= 28 or k == 120)

    def mean(self, slices: Sequence[Gradients], weight: float) -> dict[str, Tensor]:
        """Round, add as integers, scale back, divide by the total weight; a name that no slice has stays out."""
        tops = self.fit(slices)
        result = {}
        for names, k in zip(self._buckets, self.k, strict=True):
            for name in names:
                there = [s[name] for s in slices if name in s]
                if there:
                    result[name] = _exact_mean(there, k, weight)
        self.k = [_k_for(top) if top > 0 else k for k, top in zip(self.k, tops, strict=True)]
        return result


def _k_for(top: float) -> int:
    return min(120, max(-100, 40 - math.frexp(top)[1]))


def _top(gradient: Tensor) -> float:
    return float(_real(gradient).abs().max()) if gradient.numel() else 0.0


def _real(gradient: Tensor) -> Tensor:
    """In what it is summed in: doubles as they are, everything else as float32, complex numbers as pairs."""
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real if real.dtype == torch.float64 else real.to(torch.float32)


def _exact_mean(gradients: Sequence[Tensor], k: int, weight: float) -> Tensor:
    first = _real(gradients[0])
    total = torch.zeros(first.shape, dtype=torch.int64, device=first.device)
    for gradient in gradients:
        total += torch.round(_real(gradient) * 2.0**k).to(torch.int64)
    mean = total.to(first.dtype) * 2.0**-k / weight
    if gradients[0].is_complex():
        mean = torch.view_as_complex(mean)
    return mean.to(gradients[0].dtype)


def exact_norm(gradients: Gradients) -> Tensor:
    """Squares as doubles, summed over pieces of 64 K elements, tensors by name."""
    total = torch.zeros((), dtype=torch.float64)
    for name in sorted(gradients):
        gradient = gradients[name]
        flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
        for begin in range(0, flat.numel(), 65536):
            total = total.to(flat.device) + flat[begin : begin + 65536].double().square().sum()
    return total.sqrt()


def plain_norm(gradients: Gradients) -> float:
    """The norm over all gradients in double precision."""
    return math.sqrt(math.fsum(float(g.detach().abs().double().square().sum()) for g in gradients.values()))


def accumulate(total: dict[str, Tensor], gradients: Gradients) -> None:
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient
