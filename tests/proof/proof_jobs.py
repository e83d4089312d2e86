"""Small jobs of every kind that verify must neither accuse nor overlook anything in."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import echelon


class Noisy(torch.utils.data.Dataset):
    """Augments from all three generators of the process and one of its own."""

    def __init__(self, x, y):
        self.x, self.y, self.own = x, y, np.random.default_rng(5)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = (
            0.1 * torch.randn(self.x.shape[1:])
            + 0.1 * random.random()
            + 0.1 * float(np.random.rand())
            + 0.1 * float(self.own.random())
        )
        return {"x": self.x[i] + noise, "y": self.y[i]}


def _table(size, *shape, classes=4):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(size, *shape, generator=g)
    y = torch.randint(0, classes, (size,), generator=g)
    return x, y


def _words(size, length, vocabulary):
    g = torch.Generator().manual_seed(9)
    return torch.randint(0, vocabulary, (size, length), generator=g)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def weighted_loss(model, batch):
    weight = 0.01 + batch["y"].float() ** 3
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * weight).sum(), weight.sum()


def gated_loss(model, batch):
    """Weighs nothing at all in the first steps of the epoch's order, and in most slices."""
    weight = (batch["x"][:, 0] > 1.8).float()
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * weight).sum(), weight.sum()


def next_word_loss(model, batch):
    ids = batch["ids"]
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def dropout_mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


class Conv(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.na, self.nb = nn.BatchNorm2d(8, momentum=momentum), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.na(self.a(x)))
        x = F.relu(self.nb(self.b(x)))
        return self.out(x.mean((2, 3)))


class Gpt(nn.Module):
    def __init__(self, vocabulary=40, width=32, dropout=0.1, tie=True):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(40, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 40)

    def forward(self, ids):
        return self.out(self.cell(self.words(ids))[0])


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.idle = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return self.a(x)


class Mixed(nn.Module):
    """A double BatchNorm inside a single-precision model."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 8), nn.BatchNorm1d(8).double(), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.norm(self.a(x).double()).float())


class Power(nn.Module):
    """A loss that is no mean over samples: it compares samples with each other."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 8)

    def forward(self, x):
        return self.a(x)


def contrast(model, batch):
    z = F.normalize(model(batch["x"]), dim=1)
    return torch.logsumexp(z @ z.T, dim=1).mean()


def make(**changes: Any) -> echelon.Job:
    x, y = _table(70, 16)
    values: dict[str, Any] = {
        "model": mlp,
        "loss": mean_loss,
        "data": echelon.Columns(x=x, y=y),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "batch": 21,
        "slices": 5,
        "steps": 5,
    }
    return echelon.Job(**{**values, **changes})


def images():
    x, y = _table(50, 3, 8, 8)
    return echelon.Columns(x=x, y=y)


def words():
    return echelon.Columns(ids=_words(50, 13, 40))


JOBS = {
    "mlp": make,
    "clip and schedule": lambda: make(clip=0.3, schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)),
    "sgd momentum": lambda: make(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), clip=1.0),
    "adagrad": lambda: make(optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "rmsprop": lambda: make(optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5)),
    "adam no eps": lambda: make(optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-30)),
    "weights": lambda: make(loss=weighted_loss, clip=0.5),
    "weight 0": lambda: make(
        loss=gated_loss, batch=6, slices=3, steps=14, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 3)
    ),
    "noisy data": lambda: make(data=Noisy(*_table(70, 16)), model=dropout_mlp),
    "conv": lambda: make(model=Conv, data=images(), clip=1.0),
    "conv cumulative": lambda: make(model=partial(Conv, None), data=images()),
    "gpt": lambda: make(model=Gpt, loss=next_word_loss, data=words(), clip=1.0),
    "gpt no dropout": lambda: make(model=partial(Gpt, dropout=0.0), loss=next_word_loss, data=words(), clip=1.0),
    "gpt untied": lambda: make(
        model=partial(Gpt, dropout=0.0, tie=False), loss=next_word_loss, data=words(), microbatch=5
    ),
    "lstm": lambda: make(model=Lstm, loss=next_word_loss, data=words()),
    "bf16 mlp": lambda: make(precision="bf16"),
    "bf16 gpt": lambda: make(model=partial(Gpt, dropout=0.0), loss=next_word_loss, data=words(), precision="bf16"),
    "unused": lambda: make(model=Unused),
    "contrast": lambda: make(model=Power, loss=contrast),
    "double": lambda: make(
        model=lambda: mlp().double(), data=echelon.Columns(x=_table(70, 16)[0].double(), y=_table(70, 16)[1])
    ),
    "double conv": lambda: make(
        model=lambda: Conv().double(), data=echelon.Columns(x=_table(50, 3, 8, 8)[0].double(), y=_table(50, 3, 8, 8)[1])
    ),
    "mixed": lambda: make(model=Mixed, batch=20),
    "half": lambda: make(
        model=lambda: mlp().bfloat16(),
        data=echelon.Columns(x=_table(70, 16)[0].bfloat16(), y=_table(70, 16)[1]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    ),
    "data made": lambda: make(data=lambda: echelon.Columns(x=torch.randn(70, 16), y=torch.randint(0, 4, (70,)))),
    "tiny": lambda: make(loss=lambda m, b: mean_loss(m, b) * 1e-12),
    "huge": lambda: make(loss=lambda m, b: mean_loss(m, b) * 1e12, clip=1.0),
}
