"""Exercise: data-parallel training.

Every worker computes the gradient of its own share of the batch, and what is applied has to be the gradient of the
whole batch. The usual naive version averages the workers' averages. With eight slices on three workers the shares are
3, 3 and 2: an image on the third worker then pulls half as much again as the others, and which images those are
depends on how many workers there happen to be. Echelon weights by what was really counted.

The right answer is worked out by hand here, in NumPy and double precision: softmax regression on the whole batch.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise

import numpy as np
import torch
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import echelon

STEPS, RATE, SLICES = 20, 0.5, 8

digits = load_digits()
IMAGES, LABELS = digits.data[:1437] / 16, digits.target[:1437]


def make_model() -> nn.Module:
    model = nn.Linear(64, 10, bias=False)
    nn.init.zeros_(model.weight)
    return model


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


job = echelon.Job(
    model=make_model,
    loss=loss,
    data=echelon.Columns(x=IMAGES.astype(np.float32), y=LABELS),
    optimizer=lambda params: torch.optim.SGD(params, lr=RATE),
    batch=len(IMAGES),
    steps=STEPS,
    slices=SLICES,
)


def gradient(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax regression."""
    scores = images @ weights.T
    odds = np.exp(scores - scores.max(1, keepdims=True))
    error = odds / odds.sum(1, keepdims=True) - np.eye(10)[labels]
    return error.T @ images / len(images)


def descend(shares: list[slice]) -> np.ndarray:
    """By hand: each share's mean gradient, and the mean of these."""
    weights = np.zeros((10, 64))
    for _ in range(STEPS):
        weights -= RATE * np.mean([gradient(weights, IMAGES[share], LABELS[share]) for share in shares], axis=0)
    return weights


def train(workers: int) -> tuple[np.ndarray, str]:
    with tempfile.TemporaryDirectory() as folder:
        result = echelon.train(job, workers=workers, exact=True, out=f"{folder}/run", show=lambda _: None)
        return load_file(f"{result.run}/model.safetensors")["weight"], result.digest


def main() -> None:
    eighth = len(IMAGES) / SLICES
    edges = [round(eighth * count) for count in (0, 3, 6, 8)]
    right = descend([slice(None)])
    naive = descend([slice(*edge) for edge in pairwise(edges)])
    ours, digest = train(workers=3)
    _, alone = train(workers=1)
    off, naive_off = np.abs(ours - right).max(), np.abs(naive - right).max()
    assert off < 1e-5, off
    assert naive_off > 1e-3, "the naive version should be wrong"
    assert digest == alone, "three workers must train what one does"
    print(f"data parallel: mean of workers' means off by {naive_off:.4f}, Echelon by {off:.0e}, on one worker or three")


if __name__ == "__main__":
    main()
