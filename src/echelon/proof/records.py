"""What a run wrote down, read back: one entry a step and rank, the tensors of rank 0 (see echelon/record.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from echelon.checkpoint import read_tensors, write_tensors
from echelon.record import hash_of

if TYPE_CHECKING:
    from echelon.proof.reference import Done, Reference


class Record:
    """The record in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: tuple[int, dict[str, Tensor]] = (-1, {})
        self.ranks = len(list(folder.glob("rank-*")))

    def entry(self, step: int, rank: int = 0) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self._folder / f"rank-{rank}" / f"step-{step:08d}.json").read_text())
        return values

    def tensors(self, step: int, kind: str) -> dict[str, Tensor]:
        """By name; `kind` is "model" or "gradient"."""
        if self._kept[0] != step:
            self._kept = step, read_tensors(self._folder / "rank-0" / f"step-{step:08d}.safetensors")
        return {path.removeprefix(f"{kind}/"): t for path, t in self._kept[1].items() if path.startswith(f"{kind}/")}


def write_reference(folder: Path, reference: Reference, done: Done) -> None:
    """The same record of a step of the reference."""
    rank = folder / "rank-0"
    rank.mkdir(parents=True, exist_ok=True)
    tensors = {f"model/{name}": t for name, t in reference.model().items()}
    tensors |= {f"gradient/{name}": t for name, t in done.gradients.items()}
    state = {f"optimizer/{key}": v for key, v in reference.optimizer_state().items() if isinstance(v, Tensor)}
    entry = {
        "step": done.lesson.number,
        "samples": [list(piece.ids) for piece in done.lesson.pieces],
        "losses": done.losses,
        "loss": done.loss,
        "weight": done.weight,
        "applied": bool(done.weight),
        "norm": done.norm,
        "rates": reference.rates(),
        "hashes": {path: hash_of(t) for path, t in (tensors | state).items()},
    }
    name = f"step-{done.lesson.number:08d}"
    write_tensors(rank / f"{name}.safetensors", {path: t.detach().cpu() for path, t in tensors.items()}, {})
    (rank / f"{name}.json").write_text(json.dumps(entry))
