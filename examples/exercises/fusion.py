"""Exercise: fusion of data-parallel results.

Workers measure the model on their parts of the test data, and the parts' results become one. The usual naive version
averages them. But a part is no fair sample: test data often lies sorted, here by label, so that one worker sees many
of a digit and another few or none. Averaging gives a rate from three images the say of one from thirty. In Echelon a
metric returns (sum, weight), sums and weights are added over all parts, and there is one division at the end.

The right answer is counted over the whole test data at once: how many eights were found, of how many.
"""

from __future__ import annotations

import tempfile

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import echelon

WORKERS, PART, DIGIT = 3, 16, 8

digits = load_digits()
IMAGES, LABELS = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
TRAIN = slice(0, 1437)
BY_LABEL = 1437 + LABELS[1437:].argsort(stable=True)


def make_model() -> nn.Module:
    return nn.Linear(64, 10)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def found(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """How many of the eights in this part were found, of how many."""
    is_digit = batch["y"] == DIGIT
    return {"found": (int((model(batch["x"]).argmax(1)[is_digit] == DIGIT).sum()), int(is_digit.sum()))}


job = echelon.Job(
    model=make_model,
    loss=loss,
    data=echelon.Columns(x=IMAGES[TRAIN], y=LABELS[TRAIN]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    batch=256,
    epochs=4,
    evaluate=echelon.Evaluate(
        data=echelon.Columns(x=IMAGES[BY_LABEL], y=LABELS[BY_LABEL]), metric=found, every=1000, batch=PART
    ),
)


def train(workers: int) -> tuple[float, nn.Module]:
    with tempfile.TemporaryDirectory() as folder:
        result = echelon.train(job, workers=workers, exact=True, out=f"{folder}/run", show=lambda _: None)
        model = make_model()
        model.load_state_dict(load_file(f"{result.run}/model.safetensors"))
    return result.metrics["found"], model


def naive_fusion(model: nn.Module) -> float:
    """The mean of what each worker would report of its own parts."""
    rates = []
    for rank in range(WORKERS):
        parts = [BY_LABEL[start : start + PART] for start in range(rank * PART, len(BY_LABEL), WORKERS * PART)]
        mine = torch.cat(parts)
        right, weight = found(model, {"x": IMAGES[mine], "y": LABELS[mine]})["found"]
        if weight:
            rates.append(right / weight)
    return sum(rates) / len(rates)


def main() -> None:
    rates = {}
    for workers in (1, 2, WORKERS):
        rates[workers], model = train(workers)
    right, weight = found(model, {"x": IMAGES[BY_LABEL], "y": LABELS[BY_LABEL]})["found"]
    naive = naive_fusion(model)
    assert set(rates.values()) == {right / weight}, rates
    assert abs(naive - right / weight) > 1e-3, "the naive version should be wrong"
    print(
        f"fusion: {right} of {weight} eights found, {right / weight:.4f}; "
        f"mean of {WORKERS} workers' rates {naive:.4f}, Echelon {rates[WORKERS]:.4f} on any number of workers"
    )


if __name__ == "__main__":
    main()
