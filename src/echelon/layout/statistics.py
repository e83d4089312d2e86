"""BatchNorm's running statistics, kept by slice and applied in slice order, so that they do not depend on who
computed what.

A running statistic follows r <- (1 - m) r + m x for every batch x. Started from zero, a slice's c forward passes leave
b = what they contribute; from any r they lead to (1 - m)^c r + b. So every slice runs from zero, its b and c travel
to all workers (one row a slice), and commit applies the rows in slice order. With momentum None (a cumulative average
of N batches so far) the rule is (N r + c b) / (N + c).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# InstanceNorm is not among them: it does not count its batches, so that nobody knows how often it ran in a slice.
TRACKING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class RunningStatistics:
    """The running statistics of one model. Between steps its buffers hold the committed values."""

    def __init__(self, module: nn.Module, slices: int) -> None:
        found = {
            name: child
            for name, child in module.named_modules()
            if type(child) in TRACKING and child.track_running_stats and child.running_mean is not None
        }
        self.names = frozenset(
            f"{name}.{key}" if name else key
            for name in found
            for key in ("running_mean", "running_var", "num_batches_tracked")
        )
        self._norms = list(found.values())
        self._widths = [norm.running_mean.numel() for norm in self._norms]
        self.width = 2 * sum(self._widths) + len(self._norms)
        device = self._norms[0].running_mean.device if self._norms else torch.device("cpu")
        wide = any(norm.running_mean.dtype == torch.float64 for norm in self._norms)
        dtype = torch.float64 if wide else torch.float32
        self.rows = torch.zeros(slices if self._norms else 0, self.width, device=device, dtype=dtype)
        self._committed: list[tuple[Tensor, Tensor, int]] = []

    def __bool__(self) -> bool:
        return bool(self._norms)

    def begin(self) -> None:
        """Start a step: remember the committed values, forget the last step's rows."""
        self._committed = [
            (norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)) for norm in self._norms
        ]
        self.rows.zero_()

    def open(self) -> None:
        """Before a slice's forward: start from zero (a norm the user has frozen keeps its values and takes no part)."""
        for norm in self._norms:
            if norm.training:
                norm.running_mean.zero_()
                norm.running_var.zero_()
                norm.num_batches_tracked.zero_()

    def close(self, index: int) -> None:
        """After a slice's forward: what it contributed becomes its row."""
        parts = []
        for norm in self._norms:
            taken = 1.0 if norm.training else 0.0
            parts += [norm.running_mean * taken, norm.running_var * taken]
            parts.append((norm.num_batches_tracked * taken).to(norm.running_mean.dtype).reshape(1))
        self.rows[index].copy_(torch.cat(parts))

    def end(self) -> None:
        """After the last slice: put the committed values back. Once: what is committed later stays."""
        committed, self._committed = self._committed, []
        for norm, (mean, var, batches) in zip(self._norms, committed, strict=bool(committed)):
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            norm.num_batches_tracked.fill_(batches)

    def apply(self, rows: Tensor) -> None:
        """Commit every slice's contribution, in slice order."""
        for row in rows:
            start = 0
            for norm, width in zip(self._norms, self._widths, strict=True):
                mean, var, passes = torch.split(row[start : start + 2 * width + 1], [width, width, 1])
                start += 2 * width + 1
                count = int(passes)
                if count == 0:
                    continue
                before = int(norm.num_batches_tracked)
                for running, row_part in ((norm.running_mean, mean), (norm.running_var, var)):
                    seen = row_part.to(running.dtype)
                    if norm.momentum is None:
                        running.mul_(before).add_(seen * count).div_(before + count)
                    else:
                        running.mul_((1.0 - norm.momentum) ** count).add_(seen)
                norm.num_batches_tracked.fill_(before + count)
