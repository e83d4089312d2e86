"""What a job's file does while it is imported must not show in the bits."""

from __future__ import annotations

import pytest

from echelon.api import train_file
from echelon.errors import ConfigError

JOB = """
import echelon, torch
from torch.nn import functional as F

{threads}
words = list({{f"word {{number}}" for number in range(40)}})
x = torch.tensor([[float(word.split()[1]), 1.0] for word in words]) / 40


def model():
    {threads}
    return torch.nn.Linear(2, 1)


def loss(model, batch):
    assert not "{threads}" or torch.get_num_threads() == 1
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"])


job = echelon.Job(
    model=model,
    loss=loss,
    data={data},
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    batch=8, slices=4, steps=5,
)
"""
OTHER_EACH_TIME = """lambda: (
        echelon.Columns(x=x, y=torch.tensor([int.from_bytes(__import__("os").urandom(2), "big") for _ in x]).float())
    )"""


@pytest.fixture
def train(tmp_path):
    def train(data, workers, *, threads="", **options):
        (tmp_path / "job.py").write_text(JOB.format(data=data, threads=threads))
        train.shown = []
        options = {"exact": True, "out": tmp_path / f"run-{workers}", "show": train.shown.append, **options}
        return train_file(str(tmp_path / "job.py"), workers=workers, **options)

    return train


def test_a_set_of_strings_has_the_same_order_in_every_start_and_the_file_s_threads_do_not_count(train):
    data = "echelon.Columns(x=x, y=x[:, 0] * 2)"
    threads = "torch.set_num_threads(2)"
    assert train(data, 1, threads=threads).digest == train(data, 2, threads=threads).digest


def test_a_dataset_that_is_another_on_every_worker_is_refused_in_exact_mode_and_remarked_on_without(train):
    with pytest.raises(ConfigError, match="holds other samples"):
        train(OTHER_EACH_TIME, 2)
    train(OTHER_EACH_TIME, 2, exact=False)
    said = [record["message"] for record in train.shown if record["event"] == "warning"]
    assert any("--exact would refuse it" in message for message in said)


OWN = """
import echelon, torch

def main(run):
    data = echelon.Columns(x=torch.ones(40, 2))
    model, optimizer, batches = run.prepare(
        torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), data, batch=8, slices=4{length}
    )
    for epoch in range(2):
        for batch in batches:
            run.backward(model(batch["x"]).square().mean())
            optimizer.step()
"""


@pytest.mark.parametrize("length", [", steps=7", ", epochs=2", ""], ids=["steps", "epochs", "by epoch"])
def test_steps_of_the_command_line_override_those_of_a_loop_of_one_s_own(tmp_path, length):
    (tmp_path / "own.py").write_text(OWN.format(length=length))
    target, quiet = f"{tmp_path / 'own.py'}:main", {"out": tmp_path / "run", "show": lambda event: None}
    assert train_file(target, workers=2, **quiet).steps > 3
    assert train_file(target, workers=2, steps=3, **quiet).steps == 3
