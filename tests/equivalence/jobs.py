"""Small jobs, each with something in it that usually makes the result depend on the number of workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import echelon

SIZE, BATCH, SLICES = 131, 50, 7


class Noisy:
    """Each sample draws from Python's, NumPy's and torch's generators, and from one of its own."""

    def __init__(self, size: int = SIZE) -> None:
        self.x = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))
        self.own = np.random.default_rng(5)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = random.random() + np.random.rand() + float(torch.rand(())) + self.own.random()
        return self.x[index] * (1 + 0.1 * noise), int(self.x[index].sum() > 0) + int(self.x[index, 0] > 1)


class Images:
    def __init__(self, size: int = SIZE) -> None:
        self.x = torch.randn(size, 2, 6, 6, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], int(self.x[index].mean() > 0)


class Words:
    """Sequences of different lengths, padded with 0."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        words = torch.randint(1, 11, (9,), generator=torch.Generator().manual_seed(index))
        words[2 + index % 7 :] = 0
        return words


class Dense(nn.Module):
    """BatchNorm, dropout, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(12, 3)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


class Sometimes(nn.Module):
    """A part that only slices with a large value in them use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.rarely = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.rarely(x) if x.abs().max() > 3.4 else y


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()
        )
        self.last = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x))


class Language(nn.Module):
    """Embedding and output share one weight; an LSTM in between."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(11, 8, padding_idx=0)
        self.body = nn.LSTM(8, 8, batch_first=True, num_layers=2, dropout=0.2)
        self.write = nn.Linear(8, 11, bias=False)
        self.write.weight = self.read.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.write(self.body(self.read(words))[0])


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_word(model: nn.Module, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, weight) by words that count, and a thousandfold weight where the first word is 1."""
    losses = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten(), reduction="none")
    weights = (words[:, 1:] > 0).float() * torch.where(words[:, :1] == 1, 1000.0, 1.0)
    return (losses * weights.flatten()).sum(), weights.sum()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 4))


def job(**changes: Any) -> echelon.Job:
    """Everything at once: 131 samples, batches of 50 and a short one, cut into 7 slices."""
    fields = {
        "model": Dense,
        "loss": classify,
        "data": Noisy(),
        "optimizer": adamw,
        "batch": BATCH,
        "slices": SLICES,
        "steps": 7,
        "clip": 0.5,
        "schedule": warm_up,
        "seed": 11,
    }
    return echelon.Job(**{**fields, **changes})


JOBS = {
    "dense": job,
    "sometimes": lambda **more: job(model=Sometimes, optimizer=momentum, clip=None, **more),
    "images": lambda **more: job(**{"model": Convolution, "data": Images(), **more}),
    "words": lambda **more: job(model=Language, loss=next_word, data=Words(), **more),
}
