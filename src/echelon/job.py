"""What to train: model, loss, data, optimizer, batch. A `Job` knows nothing about workers; a `Plan` says how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    Loss = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, Tensor | float]"]
    Metric = Callable[[nn.Module, Any], Mapping[str, tuple[Any, Any]]]


ENDLESS = 2**31
"""So many epochs has a loop of the user's own that decides itself when to end."""


def _require(holds: bool, term: str, why: str) -> None:
    if not holds:
        raise ConfigError(term, why)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require_maker(model: object) -> None:
    """Refuse a module that was made already. Without torch, which this file can do without, there is none."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        why = f"is a {kind} that was made already; give what makes one, as model={kind} or model=lambda: {kind}(...)"
        raise ConfigError("model", f"{why}, so that every plan starts from the same weights")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measures the model on `data` every so many steps and at the end.

    `metric(model, batch)` returns `{name: (sum, weight)}`; what is reported is the total sum over the total weight, so
    the figure does not depend on how the data was cut. `batch` is how many samples one call of `metric` sees.
    """

    data: Any
    metric: Metric
    every: int = 100
    batch: int = 256

    def __post_init__(self) -> None:
        _require(callable(self.metric), "evaluate.metric", "must be callable as metric(model, batch)")
        _require(
            _whole(self.every, 1), "evaluate.every", f"must be a whole number of steps, at least 1; got {self.every!r}"
        )
        _require(
            _whole(self.batch, 1),
            "evaluate.batch",
            f"must be a whole number of samples, at least 1; got {self.batch!r}",
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, described once and validated once.

    `batch` is global: what one step consumes on any number of workers. Each step's samples are cut into `slices` nearly
    equal slices, the unit that workers share out among themselves. Give `steps` or `epochs`, not both.
    `microbatch` bounds how many samples a worker computes at once when it merges its slices (None: its whole share).
    `keep` is how many checkpoints stay on disk.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    data: Any
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: int
    steps: int | None = None
    epochs: int | None = None
    slices: int = 8
    seed: int = 0
    clip: float | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    precision: str = "fp32"
    compile: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    checkpoint_every: int | None = None
    evaluate: Evaluate | None = None
    microbatch: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        _require_maker(self.model)
        for name in ("model", "loss", "optimizer"):
            _require(callable(getattr(self, name)), name, f"must be callable; got {type(getattr(self, name)).__name__}")
        for name in ("schedule", "collate"):
            value = getattr(self, name)
            _require(value is None or callable(value), name, f"must be callable or None; got {type(value).__name__}")
        _require(_whole(self.batch, 1), "batch", f"must be a whole number of samples, at least 1; got {self.batch!r}")
        _require(_whole(self.slices, 1), "slices", f"must be a whole number, at least 1; got {self.slices!r}")
        _require(
            self.batch >= self.slices,
            "batch",
            f"{self.batch} samples a step cannot be cut into {self.slices} slices; "
            f"use batch={self.slices} or more, or slices={self.batch} or fewer",
        )
        _require(
            _whole(self.seed, 0) and self.seed < 2**63,
            "seed",
            f"must be a whole number from 0 to 2**63 - 1; got {self.seed!r}",
        )
        _require(
            (self.steps is None) != (self.epochs is None),
            "steps",
            "give either steps= or epochs=, not both and not neither",
        )
        for name in ("steps", "epochs", "checkpoint_every", "microbatch"):
            value = getattr(self, name)
            _require(
                value is None or _whole(value, 1), name, f"must be a whole number, at least 1, or None; got {value!r}"
            )
        _require(_whole(self.keep, 1), "keep", f"must be a whole number of checkpoints, at least 1; got {self.keep!r}")
        clip_is_number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool) and self.clip > 0
        _require(self.clip is None or clip_is_number, "clip", f"must be a norm above 0, or None; got {self.clip!r}")
        _require(self.precision in ("fp32", "bf16"), "precision", f'must be "fp32" or "bf16"; got {self.precision!r}')
        _require(
            self.evaluate is None or isinstance(self.evaluate, Evaluate),
            "evaluate",
            f"must be echelon.Evaluate(...) or None; got {type(self.evaluate).__name__}",
        )
