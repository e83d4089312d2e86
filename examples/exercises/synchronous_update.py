"""Exercise: synchronous update. Nobody moves on before everybody's gradient is in.

The usual naive version lets each worker take its optimizer step on its own gradient and averages the weights
afterwards. For plain SGD that comes to the same; for Adam, and wherever a gradient is clipped, it does not: the step
is no linear function of the gradient, and each worker's own is noisier than their mean. A synchronous update sums
first and steps once.

The right answer is one process: Adam on the gradient of the whole batch. It is compared after each step, too: the
run's record has to hold each step once, with all of its slices computed by somebody.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.events import read_events

STEPS, RATE, WORKERS, SLICES = 20, 0.01, 4, 8

digits = load_digits()
IMAGES = torch.from_numpy(digits.data[:1440]) / 16  # double precision: what differs is no rounding
LABELS = torch.from_numpy(digits.target[:1440])


def make_model() -> nn.Module:
    model = nn.Linear(64, 10).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


job = echelon.Job(
    model=make_model,
    loss=loss,
    data=echelon.Columns(x=IMAGES, y=LABELS),
    optimizer=lambda params: torch.optim.Adam(params, lr=RATE),
    batch=len(IMAGES),
    steps=STEPS,
    slices=SLICES,
)


def descend(replicas: int) -> Tensor:
    """By hand: each replica steps on its own share, then all take the mean of their weights."""
    models = [make_model() for _ in range(replicas)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=RATE) for model in models]
    shares = list(zip(IMAGES.chunk(replicas), LABELS.chunk(replicas), strict=True))
    for _ in range(STEPS):
        for model, optimizer, (x, y) in zip(models, optimizers, shares, strict=True):
            optimizer.zero_grad()
            loss(model, {"x": x, "y": y}).backward()
            optimizer.step()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack(same).mean(0)
                for parameter in same:
                    parameter.copy_(mean)
    return models[0].weight.detach()


def main() -> None:
    right, naive = descend(replicas=1), descend(replicas=WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        result = echelon.train(job, workers=WORKERS, out=f"{folder}/run", show=lambda _: None)
        ours = load_file(f"{result.run}/model.safetensors")["weight"]
        steps = [event for event in read_events(Path(result.run) / "events.jsonl") if event["event"] == "step"]
    off, naive_off = (ours - right).abs().max().item(), (naive - right).abs().max().item()
    assert off < 1e-9, off
    assert naive_off > 1e-3, "the naive version should be wrong"
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1)), "each step is committed once"
    assert all(sum(event["shares"].values()) == SLICES for event in steps), "no update leaves a slice out"
    print(
        f"synchronous update: step, then average off by {naive_off:.4f}; Echelon by {off:.0e} in {len(steps)} updates"
    )


if __name__ == "__main__":
    main()
