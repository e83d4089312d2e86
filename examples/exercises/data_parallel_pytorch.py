"""Exercise: data parallel on PyTorch, where samples count unequally.

Only one image in ten has a label here; the others are left out of the loss, as padding is left out of a language
model's. The usual naive version wraps the model in DistributedDataParallel and takes the mean loss of the labelled
images. DDP then averages the workers' gradients as if each had as many labels, and its sampler repeats images until
all shares are equally long. With Echelon the loss returns (sum, weight), and the gradient is the total sum's over the
total weight.

DDP really runs here, on three processes. The right answer is one process, plain PyTorch, the whole batch.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import echelon

STEPS, RATE, WORKERS = 20, 0.5, 3
NO_LABEL = -100  # what cross_entropy leaves out

digits = load_digits()
IMAGES = torch.from_numpy(digits.data[:1436]).float() / 16
HAS_LABEL = torch.rand(len(IMAGES), generator=torch.Generator().manual_seed(1)) < 0.1
LABELS = torch.where(HAS_LABEL, torch.from_numpy(digits.target[:1436]), NO_LABEL)


def make_model() -> nn.Module:
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=NO_LABEL, reduction="sum")
    return total, (batch["y"] != NO_LABEL).sum()


job = echelon.Job(
    model=make_model,
    loss=loss,
    data=echelon.Columns(x=IMAGES, y=LABELS),
    optimizer=lambda params: torch.optim.SGD(params, lr=RATE),
    batch=len(IMAGES),
    steps=STEPS,
)


def descend(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """An ordinary loop over one batch, with the ordinary mean."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, ignore_index=NO_LABEL).backward()
        optimizer.step()


def train_with_ddp(rank: int, folder: str) -> None:
    """One process of the naive version."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=timedelta(seconds=60))
    sampler = DistributedSampler(range(len(IMAGES)), shuffle=False)  # of three ranks; one image is read twice
    mine = torch.tensor(list(sampler))
    model = make_model()
    descend(DistributedDataParallel(model), IMAGES[mine], LABELS[mine])
    if rank == 0:
        save_file(model.state_dict(), f"{folder}/ddp.safetensors")
    dist.destroy_process_group()


def run_ddp(folder: str) -> dict[str, Tensor]:
    children = []
    for rank in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train_with_ddp(rank, folder)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    return load_file(Path(folder) / "ddp.safetensors")


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        naive = run_ddp(folder)
        result = echelon.train(job, workers=WORKERS, out=f"{folder}/run", show=lambda _: None)
        ours = load_file(Path(result.run) / "model.safetensors")
    model = make_model()
    descend(model, IMAGES, LABELS)
    right = model.state_dict()
    off, naive_off = distance(ours, right), distance(naive, right)
    assert off < 1e-5, off
    assert naive_off > 1e-3, "the naive version should be wrong"
    print(f"data parallel on PyTorch: DDP's mean of means off by {naive_off:.4f}, Echelon by {off:.0e}")


if __name__ == "__main__":
    main()
