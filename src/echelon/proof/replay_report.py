"""What replay says of one slice: its loss, its gradients, its inputs, and where the first value is no number."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MOST_GRADIENTS = 12
MOST_SAMPLES = 12


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """`gradients`: norm by parameter, largest first, of the slice's summed loss over its weight. `inputs`: one record a
    tensor. `first_not_finite`: where, name, kind, samples. `from_step`: the checkpoint it started from, 0 for none.
    """

    run: str
    step: int
    slice: int
    epoch: int
    from_step: int
    loss: float
    weight: float
    samples: tuple[int, ...]
    inputs: tuple[dict[str, Any], ...]
    gradient_norm: float
    gradients: tuple[tuple[str, float], ...]
    first_not_finite: dict[str, Any] | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ReplayReport:
        lists = {name: tuple(values[name]) for name in ("samples", "inputs", "notes")}
        gradients = tuple((str(name), float(norm)) for name, norm in values["gradients"])
        return cls(**{**values, **lists, "gradients": gradients})

    def text(self) -> str:
        """For people."""
        start = f"checkpoint of step {self.from_step}" if self.from_step else "the first weights"
        lines = [
            f"replay   {self.run}  step {self.step}  slice {self.slice}  epoch {self.epoch}  from {start}",
            f"loss     {self.loss:.6g}  weight {self.weight:g}",
            f"samples  {_listed(self.samples)}",
            "inputs",
        ]
        lines += [f"  {_input(record)}" for record in self.inputs] or ["  no tensors"]
        lines.append(f"gradient norms  all together {self.gradient_norm:.6g}")
        lines += [f"  {norm:12.6g}  {name}" for name, norm in self.gradients[:MOST_GRADIENTS]]
        if len(self.gradients) > MOST_GRADIENTS:
            lines.append(f"  and {len(self.gradients) - MOST_GRADIENTS} smaller ones")
        lines.append(f"finite   {_finding(self.first_not_finite)}")
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


def _listed(samples: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(sample) for sample in samples[:MOST_SAMPLES])
    return shown if len(samples) <= MOST_SAMPLES else f"{shown}, ... ({len(samples)} in all)"


def _input(record: dict[str, Any]) -> str:
    parts = [record["name"], f"{record['dtype']} {tuple(record['shape'])}"]
    for word, key in (("min", "smallest"), ("max", "largest"), ("mean", "mean")):
        if record[key] is not None:
            parts.append(f"{word} {record[key]:.6g}")
    if record["nans"] or record["infinities"]:
        parts.append(f"{record['nans']} NaN, {record['infinities']} infinite")
    return "  ".join(parts)


def _finding(found: dict[str, Any] | None) -> str:
    if found is None:
        return "every value is a finite number: parameters, inputs, module outputs, loss and gradients"
    whose = f", from sample {_listed(found['samples'])}" if found["samples"] else ""
    return f"NO: the first {found['kind']} is in {found['where']} {found['name']}{whose}".rstrip()
