"""Handwritten digits under Echelon: what five lines have made of the script ddp_before.py.

    torchrun --nproc-per-node 2 examples/ddp_after.py       or:  echelon train examples/ddp_after.py:main --workers 2

No share of the batch to compute, no sampler to remember; images at an epoch's end are neither repeated nor dropped.
"""

from __future__ import annotations

import os

import torch
from digits import Shifted, load, make_model
from torch.nn import functional as F

import echelon

EPOCHS, BATCH = 10, 128


def main(run):
    data = Shifted(load(held_out=False))
    model, optimizer, batches = run.prepare(make_model(), lambda p: torch.optim.AdamW(p, lr=3e-3), data, batch=BATCH)
    for epoch in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            run.backward(loss)
            optimizer.step()
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    images, labels = load(held_out=True)
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    if os.environ["RANK"] == "0":
        print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    echelon.launch(main)
