"""Optimizer and schedule: restored from what was saved, they go on as if nothing had happened; and what is refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from echelon.agree.norm import global_norm
from echelon.agree.update import Update
from echelon.checkpoint import folder
from echelon.errors import ConfigError
from echelon.layout import parameters_of
from echelon.state import State


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 2, bias=False)
        self.idle = nn.Parameter(torch.ones(2))


def grouped(params):
    """Two groups with their own settings; the second parameter is left to no group."""
    weight, _, other, idle = params
    return torch.optim.AdamW([{"params": [weight], "lr": 0.1}, {"params": [other, idle], "weight_decay": 0.3}], lr=0.02)


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.05),
    "amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.05, momentum=0.5, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=0.05),
    "radam": partial(torch.optim.RAdam, lr=0.05),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=0.05),
    "rprop": partial(torch.optim.Rprop, lr=0.05),
    "asgd": partial(torch.optim.ASGD, lr=0.05),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "groups": grouped,
    "tensor-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05)),
}

SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)],
        milestones=[3],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4], gamma=0.5),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "warm-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 8),
}


class Odd(torch.optim.Optimizer):
    """Keeps state under keys of every kind, and some that belongs to no parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        shared = self.state["shared"]
        shared["count"] = shared.get("count", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p]
                    kept["a/b"] = kept.get("a/b", torch.zeros_like(p)) * 0.5 + p.grad
                    kept[0] = kept.get(0, torch.zeros(())) + 1
                    p.sub_(kept["a/b"] * kept[0], alpha=group["lr"] / shared["count"])


OPTIMIZERS["odd"] = Odd


def build(optimizer, schedule=None, clip=None):
    module = Net()
    return module, Update(parameters_of(module), optimizer, schedule, clip=clip, exact=True)


def step(module, update, number):
    generator = torch.Generator().manual_seed(number)
    for name, parameter in parameters_of(module).items():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if name == "idle" else gradient
    update.apply()


def save(path, module, update):
    state = State(step=3)
    update.export(state)
    weights = {f"model/{name}": tensor for name, tensor in module.state_dict().items()}
    return folder.write(path, State(step=3, tensors={**state.tensors, **weights}, values=state.values))


def resume(path, optimizer, schedule):
    state = folder.read(path)
    module, update = build(optimizer, schedule)
    module.load_state_dict({n.removeprefix("model/"): t for n, t in state.tensors.items() if n.startswith("model/")})
    update.restore(state)
    return module, update


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [(o, "lambda") for o in OPTIMIZERS] + [(o, s) for o in ("momentum", "groups") for s in SCHEDULES if s != "lambda"],
)
def test_what_was_saved_goes_on_with_the_same_bits(tmp_path, optimizer, schedule):
    make, plan = OPTIMIZERS[optimizer], SCHEDULES[schedule]
    if optimizer == "groups" and schedule == "lambda":
        plan = lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.5**step])  # noqa: E731
    module, update = build(make, plan)
    for number in range(3):
        step(module, update, number)
    twin, resumed = resume(save(tmp_path, module, update), make, plan)
    for number in range(3, 9):
        step(module, update, number)
        step(twin, resumed, number)
        assert resumed.schedule.get_last_lr() == update.schedule.get_last_lr()
        for (name, one), other in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other), (name, number)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "nadam"])
def test_an_optimizer_saved_before_its_first_step_goes_on_too(tmp_path, optimizer):
    make = OPTIMIZERS[optimizer]
    module, update = build(make, SCHEDULES["multi-step"])
    twin, resumed = resume(save(tmp_path, module, update), make, SCHEDULES["multi-step"])
    step(module, update, 1)
    step(twin, resumed, 1)
    assert torch.equal(module.first.weight, twin.first.weight)


def test_state_is_named_by_parameter_never_by_number(tmp_path):
    module, update = build(OPTIMIZERS["adamw"])
    step(module, update, 0)
    state = State(step=1)
    update.export(state)
    assert "optimizer/first.weight/exp_avg" in state.tensors
    assert not any("idle" in name for name in state.tensors)
    assert state.values["optimizer"]["groups"][0]["params"] == list(parameters_of(module))


def test_a_schedule_moves_once_a_step_also_when_nothing_is_applied():
    module, update = build(OPTIMIZERS["sgd"], SCHEDULES["lambda"])
    step(module, update, 0)
    update.skip()
    assert update.schedule.get_last_lr() == [0.05 / 3]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_clipping_scales_to_the_norm_or_leaves_alone(clip, exact):
    module = Net()
    update = Update(parameters_of(module), OPTIMIZERS["sgd"], None, clip=clip, exact=exact)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = float(global_norm({n: p.grad for n, p in module.named_parameters()}, True))
    assert float(update.apply()) == pytest.approx(before, rel=1e-6)
    after = float(global_norm({n: p.grad for n, p in module.named_parameters()}, True))
    assert after == pytest.approx(min(before, clip), rel=1e-3)


def test_clipping_without_any_gradient_is_no_error():
    _module, update = build(OPTIMIZERS["sgd"], clip=1.0)
    assert float(update.apply()) == 0.0


def test_clipping_keeps_the_type_of_each_gradient():
    module = Net()
    module.first.bfloat16()
    module.second.double()
    update = Update(parameters_of(module), OPTIMIZERS["sgd"], None, clip=0.1, exact=True)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    update.apply()
    assert [p.grad.dtype for p in module.parameters()] == [p.dtype for p in module.parameters()]


def test_another_optimizer_than_the_checkpoint_s_is_refused(tmp_path):
    path = save(tmp_path, *build(OPTIMIZERS["adamw"]))
    with pytest.raises(ConfigError, match="made by AdamW and this job uses SGD"):
        resume(path, OPTIMIZERS["sgd"], None)


def test_other_groups_than_the_checkpoint_s_are_refused(tmp_path):
    path = save(tmp_path, *build(OPTIMIZERS["adamw"]))
    with pytest.raises(ConfigError, match="parameter groups"):
        resume(path, OPTIMIZERS["groups"], None)


def closure_needed(params):
    return torch.optim.LBFGS(params)


def foreign(params):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (closure_needed, "LBFGS computes the loss again"),
        (foreign, "not the model's"),
        (lambda params: params, "must return a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_take_a_given_gradient_is_refused(make, why):
    with pytest.raises(ConfigError, match=why) as caught:
        build(make)
    assert caught.value.term == "optimizer"


def test_a_schedule_that_needs_a_metric_is_refused():
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        build(OPTIMIZERS["sgd"], lr_scheduler.ReduceLROnPlateau)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(ConfigError, match="schedule"):
        build(OPTIMIZERS["sgd"], lambda optimizer: math.pi)
