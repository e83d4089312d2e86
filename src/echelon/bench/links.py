"""`echelon bench links`, where it was called: starts ranks on this machine and gets their report, or is one of
torchrun's ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from echelon.bench.report import LinksReport
from echelon.errors import ConfigError
from echelon.fleet import PRELOAD, Start, launch
from echelon.worker import rank_around_us, workers_around_us

SIZES = (4 << 10, 1 << 20, 25 << 20)
"""Of the all-reduces, in bytes: a norm, a small bucket, a full bucket of gradients."""
WORKERS = 2
END_S = 1.0
"""A stop is obeyed at once: nothing would be lost."""

Show = Callable[[dict[str, Any]], None]


def bench_links(
    *, workers: int | None = None, sizes: Sequence[int] = SIZES, show: Show = lambda _: None
) -> LinksReport | None:
    """Measure every link, and all-reduce by topology. The report is rank 0's; None on torchrun's other ranks."""
    around = workers_around_us()
    count = around if around is not None else workers if workers is not None else WORKERS
    if around is not None and workers not in (None, around):
        raise ConfigError("workers", f"is {workers} and WORLD_SIZE is {around}; leave it out, or make them equal")
    if count < 2:
        raise ConfigError("workers", f"is {count}; a link is between two, so say 2 or more")
    request = {"sizes": list(sizes)}
    if around is not None:
        from echelon.bench.ranks import run_joined

        found = run_joined(request, show if rank_around_us() == 0 else lambda _: None)
    else:
        preload = (*PRELOAD, "echelon.bench.ranks")
        start = Start(
            entry="echelon.bench.ranks:run_started", request=request, workers=count, grace_s=END_S, preload=preload
        )
        found = launch(start, show)[0]["report"]
    return LinksReport.from_dict(found) if found is not None else None
