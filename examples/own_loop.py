"""The same GPT with a training loop of one's own: `echelon.launch` calls `main(run)` on every worker.

    echelon train examples/own_loop.py:main --workers 2     or:  python examples/own_loop.py

What differs from a loop for one process: `run.prepare` makes the model, the optimizer and the batches, and
`run.backward` takes the loss. `optimizer.step()` commits one agreed update; clipping and the schedule belong to that
update, so they are handed to `prepare`. Each worker sees its own part of a step's samples. In exact mode the body
runs once a slice, and the weights are those of gpt.py to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from gpt import GPT, loss, make_optimizer, make_schedule, windows

import echelon

if TYPE_CHECKING:
    from echelon.own import Run

LAYERS, WIDTH, HEADS, CONTEXT, DROPOUT = 4, 128, 4, 64, 0.1
BATCH, STEPS, CLIP = 32, 300, 1.0
LOOK_EVERY = 50


def main(run: Run) -> None:
    model, optimizer, batches = run.prepare(
        GPT(LAYERS, WIDTH, HEADS, CONTEXT, DROPOUT),
        make_optimizer,
        windows(CONTEXT, held_out=False),
        batch=BATCH,
        steps=STEPS,
        clip=CLIP,
        schedule=partial(make_schedule, steps=STEPS),
    )
    for number, batch in enumerate(batches, start=1):
        value = loss(model, batch)
        run.backward(value)
        optimizer.step()
        if number % LOOK_EVERY == 0 and run.rank == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(f"worker 0, batch {number}: loss {value.item():.3f} of its own share, learning rate {rate:.1e}")
    if run.rank == 0:
        held_out = windows(CONTEXT, held_out=True)
        model.eval()
        with torch.no_grad():
            print(f"held-out loss {loss(model, held_out[:64]).item():.3f}")


if __name__ == "__main__":
    echelon.launch(main)
