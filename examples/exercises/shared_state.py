"""Exercise: state that workers share, on PyTorch.

Parameters are not all that training changes. BatchNorm counts batches and follows their mean and variance, in buffers
that no gradient reaches. The usual naive version (DistributedDataParallel's, too) lets every replica follow its own
batches and keeps rank 0's: what the others saw is lost, and how much that is depends on the number of workers.
Echelon sends each slice's statistics along with the gradients and applies all of them, in slice order, on every
worker.

The right answer is known: with momentum=None and slices of equal length, the mean that BatchNorm has followed for one
epoch is the mean of the data.
"""

from __future__ import annotations

import tempfile

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.data.order import Order
from echelon.slices import Course, assign

BATCH, SLICES, STEPS = 256, 8, 7

digits = load_digits()
IMAGES = torch.from_numpy(digits.data[: BATCH * STEPS]).float() / 16
LABELS = torch.from_numpy(digits.target[: BATCH * STEPS])


def make_model() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 10))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


job = echelon.Job(
    model=make_model,
    loss=loss,
    data=echelon.Columns(x=IMAGES, y=LABELS),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    batch=BATCH,
    epochs=1,
    slices=SLICES,
)


def mean_seen_by_first_of(workers: int) -> tuple[Tensor, int]:
    """What rank 0 alone would have followed, and in how many batches."""
    order, course = Order(len(IMAGES), job.seed), Course(size=len(IMAGES), batch=BATCH, slices=SLICES, epochs=1)
    norm = nn.BatchNorm1d(64, momentum=None)
    share = assign(SLICES, [1.0] * workers)[0]
    for number in range(1, course.total + 1):
        for piece in course.step(number).slices[share.start : share.stop]:
            norm(IMAGES[torch.from_numpy(order.ids(0, piece.start, piece.stop))])
    return norm.running_mean, int(norm.num_batches_tracked)


def train(workers: int) -> tuple[dict[str, Tensor], str]:
    with tempfile.TemporaryDirectory() as folder:
        result = echelon.train(job, workers=workers, exact=True, out=f"{folder}/run", show=lambda _: None)
        return load_file(f"{result.run}/model.safetensors"), result.digest


def main() -> None:
    trained = {workers: train(workers) for workers in (1, 2, 3)}
    model, digest = trained[3]
    right = IMAGES.mean(0)
    naive, naive_batches = mean_seen_by_first_of(3)
    off, naive_off = (model["0.running_mean"] - right).abs().max(), (naive - right).abs().max()
    batches = int(model["0.num_batches_tracked"])
    assert off < 1e-6, off
    assert naive_off > 1e-2, "the naive version should be wrong"
    assert batches == STEPS * SLICES > naive_batches
    assert {one for _, one in trained.values()} == {digest}, "the state must not depend on the number of workers"
    print(
        f"shared state: rank 0's mean off by {naive_off:.3f} after {naive_batches} of {batches} slices, "
        f"Echelon's by {off:.0e} after all {batches}"
    )


if __name__ == "__main__":
    main()
