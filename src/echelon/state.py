"""What outlives a worker: tensors and plain values, by name and never by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class State:
    """`tensors` are named like `model/NAME` and `optimizer/PARAMETER/KEY`; `values` is anything `checkpoint` can
    write as text.
    """

    step: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
