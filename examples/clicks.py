"""Who clicks on what: a click model that is nearly all embeddings, on a log of few famous items and many rare.

    echelon train examples/clicks.py --workers 2            or:  python examples/clicks.py

The log is made here, from a fixed seed: 500,000 showings of 50,000 items to 3,000 users. How often an item is shown
follows Zipf's law (the nth item about 1/n as often as the first); whether it is clicked depends on hidden tastes of
user and item. As in real logs, clicks are rare and only one showing in four without a click was kept, so each of
those counts as four: the loss returns (sum, weight). A mean over samples, let alone a mean of workers' means, would
be wrong here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon

USERS, ITEMS, WIDTH = 3_000, 50_000, 32
SHOWINGS, HELD_OUT = 500_000, 40_000
BATCH, STEPS = 2048, 150
LEARNING_RATE, DECAY = 2e-3, 1e-4
KEPT = 0.25  # of the showings without a click
SEED = 20


def make_log(held_out: bool) -> echelon.Columns:
    """Draw showings and clicks from the hidden tastes; the last ones drawn are held out."""
    draw = np.random.default_rng(SEED)
    popularity = 1 / np.arange(1, ITEMS + 1)
    users = draw.integers(USERS, size=SHOWINGS)
    items = draw.choice(ITEMS, size=SHOWINGS, p=popularity / popularity.sum())
    tastes = draw.normal(size=(USERS, 2)), draw.normal(size=(ITEMS, 2))
    appeal = draw.normal(size=ITEMS)
    odds = np.exp(-2.5 + appeal[items] + (tastes[0][users] * tastes[1][items]).sum(1))
    clicked = draw.random(SHOWINGS) < odds / (1 + odds)
    kept = clicked | (draw.random(SHOWINGS) < KEPT)
    part = slice(SHOWINGS - HELD_OUT, None) if held_out else slice(SHOWINGS - HELD_OUT)
    rows = np.flatnonzero(kept[part]) + (part.start or 0)
    return echelon.Columns(
        user=users[rows],
        item=items[rows],
        clicked=clicked[rows].astype(np.float32),
        weight=np.where(clicked[rows], 1.0, 1 / KEPT).astype(np.float32),
    )


class Clicks(nn.Module):
    """The odds of a click: how user and item fit, corrected by a small network, plus the item's own appeal."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.appeal = nn.Embedding(ITEMS, 1)
        self.network = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in (self.user, self.item, self.appeal):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        user, item = self.user(batch["user"]), self.item(batch["item"])
        fit = (user * item).sum(1, keepdim=True)
        return (fit + self.appeal(batch["item"]) + self.network(torch.cat([user, item], 1))).squeeze(1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = F.binary_cross_entropy_with_logits(model(batch), batch["clicked"], reduction="none")
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def surprise(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The log loss, and the rate of clicks that is predicted beside the one that was seen."""
    odds, weight = model(batch), batch["weight"]
    each = F.binary_cross_entropy_with_logits(odds, batch["clicked"], reduction="none")
    return {
        "log loss": ((each * weight).sum(), weight.sum()),
        "predicted": ((odds.sigmoid() * weight).sum(), weight.sum()),
        "clicked": ((batch["clicked"] * weight).sum(), weight.sum()),
    }


def make_job(steps: int = STEPS, batch: int = BATCH) -> echelon.Job:
    return echelon.Job(
        model=Clicks,
        loss=loss,
        data=lambda: make_log(held_out=False),
        optimizer=lambda params: torch.optim.Adam(params, lr=LEARNING_RATE, weight_decay=DECAY),
        batch=batch,
        steps=steps,
        evaluate=echelon.Evaluate(
            data=lambda: make_log(held_out=True), metric=surprise, every=max(1, steps // 3), batch=2048
        ),
    )


job = make_job()

if __name__ == "__main__":
    result = echelon.train(job)
    predicted, clicked = result.metrics["predicted"], result.metrics["clicked"]
    print(f"log loss {result.metrics['log loss']:.4f}; clicks predicted {predicted:.2%}, and {clicked:.2%} clicked")
