"""`echelon bench`: what this machine, or the machines that torchrun spans, give to training.

    links      the launching side of `echelon bench links`: starts ranks, or is one of torchrun's
    ranks      what every rank does: join, measure, predict, report
    measure    messages and collectives under a stopwatch
    report     what was found, as a value, as text and as JSON

Importing this does not import torch.
"""

from __future__ import annotations

from echelon.bench.links import SIZES, bench_links
from echelon.bench.report import LinksReport, parse_size

__all__ = ["SIZES", "LinksReport", "bench_links", "parse_size"]
