"""The examples in a size for tests: few steps, tiny models, otherwise as they are.

Every name in NAMES is a job or a `main(run)`, for `echelon train small.py:NAME`, for a fork of whoever imports this,
and for torchrun:  torchrun small.py NAME OUT

With SMALL_GATE set to a path, losses after the first few are held back until that path exists: a run that is still
going when somebody wants to stop it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import echelon

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "exercises")]

GATE = os.environ.get("SMALL_GATE")
FREE = 3  # losses that each worker computes before the gate
PATIENCE_S = 60

PROGRAMS = ("digits", "gpt", "clicks", "own_loop")
# Steps that cross the end of an epoch where there is one within reach.
# Left out is synchronised_parameters: its initial weights are another process's number every time, on purpose.
EXERCISES = {"data_parallel": 4, "data_parallel_pytorch": 4, "fusion": 7, "shared_state": 8, "synchronous_update": 4}
NAMES = (*PROGRAMS, "ddp_after", *EXERCISES)


class Gated:
    """A loss that waits for the gate. What it computes is the same."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self._free = FREE

    def __call__(self, model: Any, batch: Any) -> Any:
        self._free -= 1
        until = time.monotonic() + PATIENCE_S
        while GATE and self._free < 0 and not Path(GATE).exists():
            assert time.monotonic() < until, "the gate never opened"
            time.sleep(0.01)
        return self._loss(model, batch)


@cache
def shrink(name: str) -> Any:
    example = import_module(name)
    if name == "own_loop":
        sizes = {"LAYERS": 1, "WIDTH": 16, "HEADS": 2, "CONTEXT": 16, "BATCH": 10, "STEPS": 30}
        vars(example).update(sizes, loss=Gated(example.loss))
        return example.main
    if name == "ddp_after":
        example.EPOCHS = 1
        return example.main
    if name == "gpt":
        job, steps = example.make_job(layers=1, width=16, heads=2, context=16, batch=10, steps=30), 30
    elif name == "clicks":
        vars(example).update(USERS=50, ITEMS=300, WIDTH=8, SHOWINGS=3000, HELD_OUT=500)
        job, steps = example.make_job(batch=100, steps=30), 30
    else:
        job, steps = example.job, EXERCISES.get(name, 25)  # 25: the digits' 12th step is short
    return replace(job, loss=Gated(job.loss), steps=steps, epochs=None)


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return shrink(name)
    raise AttributeError(name)


def run(name: str, **options: Any) -> echelon.Result:
    what = shrink(name)
    return (echelon.train if isinstance(what, echelon.Job) else echelon.launch)(what, **options)


if __name__ == "__main__":
    run(sys.argv[1], exact=True, out=sys.argv[2])
