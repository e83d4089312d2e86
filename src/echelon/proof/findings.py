"""What the comparison of one step found: plain values, which likely_reason turns into a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of the plan's beside the reference's."""

    plan: float
    reference: float
    tolerance: float = 0.0

    @property
    def difference(self) -> float:
        return abs(self.plan - self.reference)

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance  # false for NaN


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Many tensors compared: the largest difference, its tolerance, and the names of those beyond theirs."""

    difference: float = 0.0
    tolerance: float = 0.0
    different: tuple[str, ...] = ()
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class Clues:
    """What a closer look at a step that differs has shown. Causes are words; see clues.py for what they mean.

    `ranks_off`: ranks whose slices have other losses. `gradient_cause`, with `gradient_number` to go with it.
    `rounding_only`: the difference is within what another order of the same additions makes.
    """

    draws: bool = False
    ranks_off: tuple[int, ...] = ()
    gradient_cause: str = ""
    gradient_number: float = 0.0
    update_cause: str = ""
    buffer_cause: str = ""
    changed_buffers: tuple[str, ...] = ()
    rounding_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Findings:
    """One step. `missing` and `extra`: sample ids that the plan did not read, or should not have read (so often)."""

    step: int
    last_of_epoch: bool
    workers: int
    loss: Figure
    weight: Figure
    norm: Figure
    gradients: Tensors
    parameters: Tensors
    buffers: Tensors
    missing: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()
    clip: float | None = None
    clip_norm: Figure | None = None
    rates: tuple[Figure, ...] = ()
    optimizer: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    clues: Clues = field(default_factory=Clues)

    @property
    def kind(self) -> str:
        """The first thing that differs, in the order in which a step makes them; empty if nothing does."""
        found = (
            (bool(self.missing or self.extra), "samples"),
            (not self.loss.ok, "loss"),
            (not self.weight.ok, "weight"),
            (bool(self.gradients.different), "gradient"),
            (self.clip_norm is not None and not self.clip_norm.ok, "norm"),
            (bool(self.parameters.different), "parameter"),
            (bool(self.buffers.different), "buffer"),
            (bool(self.optimizer), "optimizer state"),
            (not all(rate.ok for rate in self.rates), "learning rate"),
            (bool(self.ranks), "ranks"),
        )
        return next((kind for differs, kind in found if differs), "")

    @property
    def name(self) -> str:
        """The first parameter, buffer or number that differs."""
        for names in (
            self.gradients.different,
            self.parameters.different,
            self.buffers.different,
            self.optimizer,
            self.ranks,
        ):
            if names:
                return names[0]
        return self.kind
