"""Handwritten digits, read by a small convolutional network: the first job to look at, and what `make demo` runs.

    echelon train examples/digits.py --workers 2            or:  python examples/digits.py

1,797 images of 8 x 8 grey levels come with scikit-learn. Every time an image is read it is shifted by up to a pixel,
with numbers drawn from Python's own `random`: under Echelon they are a function of (seed, epoch, sample), so the
training is the same on any number of workers. Four of five images are for training, the others measure.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import echelon

EPOCHS = 20
BATCH = 128
LEARNING_RATE = 3e-3


class Split(NamedTuple):
    """Images in [0, 1] and what they show."""

    images: Tensor
    labels: Tensor


def load(held_out: bool) -> Split:
    """Every fifth image is held out."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    chosen = (torch.arange(len(images)) % 5 == 0) == held_out
    return Split(images[chosen], torch.from_numpy(digits.target)[chosen])


class Shifted(Dataset[dict[str, Tensor]]):
    """Each image moved by -1, 0 or 1 pixel in both directions, another way every epoch."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(self._split.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        right, down = random.randint(-1, 1), random.randint(-1, 1)
        padded = F.pad(self._split.images[index], (1, 1, 1, 1))
        return {"x": padded[:, 1 + down : 9 + down, 1 + right : 9 + right], "y": self._split.labels[index]}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """(sum, weight): how many were right, of how many. Echelon adds up both before it divides."""
    right = (model(batch["x"]).argmax(1) == batch["y"]).sum()
    return {"accuracy": (right, len(batch["y"]))}


def make_test_data() -> echelon.Columns:
    split = load(held_out=True)
    return echelon.Columns(x=split.images, y=split.labels)


job = echelon.Job(
    model=make_model,
    loss=loss,
    data=lambda: Shifted(load(held_out=False)),
    optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
    batch=BATCH,
    epochs=EPOCHS,
    clip=1.0,
    checkpoint_every=100,
    evaluate=echelon.Evaluate(data=make_test_data, metric=accuracy, every=60),
)

if __name__ == "__main__":
    result = echelon.train(job)
    print(f"{result.metrics['accuracy']:.1%} of the held-out digits were read right")
