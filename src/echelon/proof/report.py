"""What verify says: a table, the first difference, a likely reason, and the tolerances it held the plan to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from echelon.result import FIELDS, Result


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step: the plan's loss and gradient norm beside the reference's, the worst gradient and the worst parameter.

    Differences and tolerances of gradients and parameters are those of the tensor that comes closest to its tolerance.
    """

    step: int
    loss: float
    reference_loss: float
    loss_tolerance: float
    norm: float
    reference_norm: float
    norm_tolerance: float
    gradient_difference: float
    gradient_tolerance: float
    parameter_difference: float
    parameter_tolerance: float
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """`max_abs_diff` is the largest difference that a parameter or buffer of the plan has, after any step, from the
    reference's that ran freely beside it; unless exact it includes what training makes of rounding, and is no verdict.
    `result` is that of the run under the plan; its folder was not kept, so `run` is empty.
    """

    equal: bool
    max_abs_diff: float
    first_difference: dict[str, Any] | None
    likely_reason: str
    tolerances: dict[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    exact: bool
    result: Result

    @property
    def plan(self) -> str:
        return self.result.plan

    @property
    def workers(self) -> int:
        return self.result.workers

    @property
    def steps(self) -> int:
        return self.result.steps

    def to_dict(self) -> dict[str, Any]:
        """The result's fields, and beside them the proof's."""
        values = asdict(self)
        values["rows"] = [asdict(row) for row in self.rows]
        values["notes"] = list(self.notes)
        return {**values.pop("result"), **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        own = {entry.name: values[entry.name] for entry in fields(cls) if entry.name != "result"}
        rows = tuple(Row(**row) for row in values["rows"])
        result = Result(**{name: values[name] for name in FIELDS})
        return cls(**{**own, "rows": rows, "notes": tuple(values["notes"]), "result": result})

    def difference(self) -> str:
        """Where the two differ first, in words; empty if they do not."""
        return "" if self.first_difference is None else _place(self.first_difference)

    def text(self) -> str:
        """For people."""
        workers = f"{self.workers} worker{'s' if self.workers != 1 else ''}"
        lines = [
            f"verify  plan {self.plan}  {workers}  {self.steps} steps  {'exact' if self.exact else 'within rounding'}",
            "",
        ]
        lines += _table(self.rows)
        lines += ["", f"tolerance  {self.tolerances['rule']}"]
        lines += [f"note       {note}" for note in self.notes]
        lines.append(
            f"drift      largest parameter difference from one process left to itself: {_number(self.max_abs_diff)}"
        )
        if self.equal:
            sameness = "the same bits as" if self.exact else "what rounding allows of"
            lines.append(f"equal      {self.steps} steps on {workers} are {sameness} one plain process")
        else:
            lines += [f"different  first in {self.difference()}", f"likely     {self.likely_reason}"]
        return "\n".join(lines)


HEADS = (
    "step",
    "loss",
    "reference",
    "grad norm",
    "reference",
    "max grad diff",
    "tolerance",
    "max param diff",
    "tolerance",
    "ok",
)


def _table(rows: tuple[Row, ...]) -> list[str]:
    cells: list[tuple[str, ...]] = [HEADS]
    for row in rows:
        numbers = (row.loss, row.reference_loss, row.norm, row.reference_norm)
        small = (row.gradient_difference, row.gradient_tolerance, row.parameter_difference, row.parameter_tolerance)
        shown = [*(f"{n:.6f}" for n in numbers), *(_number(n) for n in small)]
        cells.append((str(row.step), *shown, "yes" if row.ok else "NO"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def _place(first: dict[str, Any]) -> str:
    what = first["kind"] if first["name"] == first["kind"] else f"{first['kind']} {first['name']}"
    amount = ""
    if "difference" in first:
        amount = f" by {_number(first['difference'])} (tolerance {_number(first['tolerance'])})"
    return f"step {first['step']}: {what}{amount}"
