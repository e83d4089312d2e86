"""What a training run came to: the public `Result`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """`loss` is the weighted mean of the last committed step; `samples` counts committed ones, resumes included.

    `seconds` runs from the first begin to the last commit, `step_ms` is the median from commit to commit with the first
    ten left out, `start_ms` runs from the start of the command to the first begin. `bytes_sent` is the payload handed
    to any transport by all ranks.
    """

    steps: int
    samples: int
    loss: float | None
    digest: str
    seconds: float
    step_ms: float | None
    start_ms: float
    bytes_sent: int
    plan: str
    workers: int
    run: str
    recoveries: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


FIELDS = tuple(entry.name for entry in fields(Result))
