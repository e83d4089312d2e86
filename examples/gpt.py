"""A small GPT that learns English, letter by letter, from half a megabyte of Python's own documentation.

    echelon train examples/gpt.py --workers 2               or:  python examples/gpt.py

Dropout, tied input and output embeddings, AdamW with decay on matrices only, warm-up and cosine, one global norm. On
a GPU take it larger, in a file of your own (17 layers of width 768 are 120 M parameters):

    from gpt import make_job
    job = make_job(layers=17, width=768, heads=12, context=1024, batch=64, precision="bf16", compiled=True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import echelon

LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 64
DROPOUT = 0.1
BATCH, STEPS = 32, 300
LEARNING_RATE, WARM_UP, CLIP = 3e-3, 20, 1.0
HELD_OUT = 10  # one window of so many measures and is never trained on


@cache
def read_text() -> tuple[Tensor, str]:
    """The text as numbers, and its letters: number n stands for letters[n]."""
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = "".join(sorted(set(text)))
    number = {letter: n for n, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in text], device="cpu"), letters


def windows(context: int, *, held_out: bool) -> echelon.Columns:
    """The text in windows of `context` letters; y is x one letter later."""
    text, _ = read_text()
    cut = text.unfold(0, context + 1, context)
    chosen = cut[(torch.arange(len(cut)) % HELD_OUT == 0) == held_out]
    return echelon.Columns(x=chosen[:, :-1], y=chosen[:, 1:])


class Block(nn.Module):
    """Attention to the letters before, then a two-layer network, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        cut = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = cut.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.project(seen.transpose(1, 2).reshape(batch, length, width)), dropout)
        return x + F.dropout(self.network(self.norm_network(x)), dropout)


class GPT(nn.Module):
    """Letters in, one guess of the next letter for each out."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(read_text()[1]), width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.guess = nn.Linear(width, self.letter.num_embeddings, bias=False)
        self.guess.weight = self.letter.weight  # tied: one tensor under two names
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("project.weight", "network.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.guess(self.norm(self.blocks(self.letter(x) + self.place(places))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def bits_per_letter(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"bits per letter": (loss(model, batch) * batch["y"].numel() / math.log(2), batch["y"].numel())}


def make_optimizer(params: Iterable[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    every = list(params)
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def make_schedule(optimizer: torch.optim.Optimizer, steps: int = STEPS, warm_up: int = WARM_UP) -> LambdaLR:
    """Linear warm-up, then half a cosine down to a tenth."""

    def share(step: int) -> float:
        rising = (step + 1) / warm_up
        falling = 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0))
        return min(rising, falling)

    return LambdaLR(optimizer, share)


def make_job(
    *,
    layers: int = LAYERS,
    width: int = WIDTH,
    heads: int = HEADS,
    context: int = CONTEXT,
    dropout: float = DROPOUT,
    batch: int = BATCH,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    slices: int = 8,
    precision: str = "fp32",
    compiled: bool = False,
    every: int = 100,
) -> echelon.Job:
    return echelon.Job(
        model=partial(GPT, layers, width, heads, context, dropout),
        loss=loss,
        data=partial(windows, context, held_out=False),
        optimizer=partial(make_optimizer, learning_rate=learning_rate),
        batch=batch,
        steps=steps,
        slices=slices,
        clip=CLIP,
        schedule=partial(make_schedule, steps=steps),
        precision=precision,
        compile=compiled,
        checkpoint_every=every,
        evaluate=echelon.Evaluate(
            data=partial(windows, context, held_out=True), metric=bits_per_letter, every=every, batch=batch
        ),
    )


job = make_job()

if __name__ == "__main__":
    result = echelon.train(job)
    print(f"{result.metrics['bits per letter']:.2f} bits per letter (log2 of the {len(read_text()[1])} letters: 6.7)")
