"""Exercise: synchronised parameters. Workers that apply the same updates stay equal only if they begin equal.

The usual naive version has every worker make its model and averages gradients from then on. If anything differs when
the models are made (a seed that depends on the rank or the process, one more random number drawn before), the weights
stay as far apart as they were: averaging gradients never brings them together. Echelon makes the model under the
job's seed, compares the result on all workers before the first step and, where it differs nevertheless, gives all of
them rank 0's.

The model here is seeded with the process number, to provoke it. While it trains, every worker reports a checksum of
the weights it really holds.
"""

from __future__ import annotations

import hashlib
import os
import tempfile

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import echelon

STEPS, RATE, WORKERS = 20, 0.5, 3

digits = load_digits()
IMAGES = torch.from_numpy(digits.data[:1440]).float() / 16
LABELS = torch.from_numpy(digits.target[:1440])


def make_model(seed: int | None = None) -> nn.Module:
    torch.manual_seed(os.getpid() if seed is None else seed)
    return nn.Linear(64, 10)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def checksum(weights: dict[str, Tensor]) -> float:
    code = hashlib.sha256(b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights)))
    return float(int.from_bytes(code.digest()[:6], "little"))


def report(model: nn.Module, _batch: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """A metric named after the worker that computes it; each is asked for one of as many batches."""
    return {f"rank {os.environ['RANK']}": (checksum(model.state_dict()), 1.0)}


job = echelon.Job(
    model=make_model,
    loss=loss,
    data=echelon.Columns(x=IMAGES, y=LABELS),
    optimizer=lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.9),
    batch=360,
    steps=STEPS,
    evaluate=echelon.Evaluate(data=echelon.Columns(one=torch.zeros(WORKERS)), metric=report, batch=1),
)


def spread_of_naive_replicas() -> float:
    """Replicas with seeds of their own that always apply the same mean gradient."""
    models = [make_model(seed=rank) for rank in range(WORKERS)]
    shares = list(zip(IMAGES.chunk(WORKERS), LABELS.chunk(WORKERS), strict=True))
    for _ in range(STEPS):
        for model, (x, y) in zip(models, shares, strict=True):
            model.zero_grad()
            loss(model, {"x": x, "y": y}).backward()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([parameter.grad for parameter in same]).mean(0)
                for parameter in same:
                    parameter.sub_(RATE * mean)
    return max((model.weight - models[0].weight).abs().max().item() for model in models)


def main() -> None:
    naive = spread_of_naive_replicas()
    with tempfile.TemporaryDirectory() as folder:
        result = echelon.train(job, workers=WORKERS, exact=True, out=f"{folder}/run", show=lambda _: None)
        saved = checksum(load_file(f"{result.run}/model.safetensors"))
    assert sorted(result.metrics) == [f"rank {rank}" for rank in range(WORKERS)], "every worker has reported"
    assert set(result.metrics.values()) == {saved}, "every worker must hold the weights that were saved"
    assert naive > 1e-2, "the naive version should be wrong"
    print(
        f"synchronised parameters: naive replicas {naive:.3f} apart after {STEPS} steps; "
        f"Echelon's {WORKERS} workers hold one checksum, {saved:.0f}"
    )


if __name__ == "__main__":
    main()
