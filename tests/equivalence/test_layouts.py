"""The same bits however the slices are shared out: hundreds of layouts, in one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.agree import Skipped
from echelon.errors import Diverged, UserError
from echelon.slices import assign
from equivalence.jobs import JOBS, Dense, Images, classify, job, momentum
from lockstep import Fleet

SLICES = 7


@pytest.fixture(scope="module")
def alone():
    """Each job's digest on one worker, computed when it is first asked for."""
    known = {}

    def digest(name):
        if name not in known:
            known[name] = Fleet(JOBS[name], 1).run().digest()
        return known[name]

    return digest


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_any_number_of_workers_gives_the_same_bits(alone, name, workers):
    assert Fleet(JOBS[name], workers).run().digest() == alone(name)


@settings(max_examples=12)
@given(data=st.data(), name=st.sampled_from(sorted(JOBS)))
def test_any_shares_that_change_every_step_give_the_same_bits(alone, data, name):
    workers = data.draw(st.integers(1, 5))
    fleet = Fleet(JOBS[name], workers)
    weight = st.integers(0, 5)
    for number in range(1, fleet.total + 1):
        weights = data.draw(st.lists(weight, min_size=workers, max_size=workers).filter(any))
        fleet.step(number, assign(SLICES, weights))
    assert fleet.digest() == alone(name)


@pytest.mark.parametrize("name", JOBS)
def test_assembling_again_on_another_number_of_workers_gives_the_same_bits(alone, name):
    state, start = None, 1
    for workers, stop in ((3, 2), (1, 3), (4, 5), (2, 7)):
        fleet = Fleet(JOBS[name], workers)
        if state is not None:
            fleet.restore(state)
        state, start = fleet.run(start, stop).export(), stop + 1
    assert fleet.digest() == alone(name)


def test_assembling_again_around_the_same_model_leaves_no_hooks_behind(alone):
    from echelon.assemble import assemble, prepare_module
    from echelon.plan import Plan

    first = Fleet(JOBS["dense"], 1).run(1, 3)
    state, module = first.export(), first.parts[0].module
    first.parts[0].agreement.detach()
    prepared = prepare_module(
        JOBS["dense"](), Plan(), module, workers=1, device=torch.device("cpu"), exact=True, merge=True
    )
    second = Fleet(JOBS["dense"], 1)
    second.parts = [assemble(prepared, second.groups[0])]
    assert second.restore(state).run(4).digest() == alone("dense")


def test_the_grid_follows_small_gradients_and_is_part_of_the_state():
    """Gradients around 2**-12: a grid of spacing 2**-40 holds them, but not all their bits."""

    def make():
        return job(loss=lambda model, batch: classify(model, batch) / 512, clip=None)

    never_stopped = Fleet(make, 1).run()
    first = Fleet(make, 2).run(1, 4)
    state = first.export()
    (k,) = state.values["grid"]
    assert k > 45
    assert Fleet(make, 3).restore(state).run(5).digest() == never_stopped.digest()
    state.values["grid"] = [40]
    assert Fleet(make, 3).restore(state).run(5).digest() != never_stopped.digest()


def test_another_seed_gives_other_bits(alone):
    assert Fleet(lambda: JOBS["dense"](seed=12), 1).run().digest() != alone("dense")


def test_a_part_that_some_slices_do_not_use_is_trained_by_those_that_do():
    """The job tests nothing unless some steps have slices of either kind."""
    used = []
    fleet = Fleet(JOBS["sometimes"], 1)
    fleet.parts[0].module.rarely.register_forward_hook(lambda *_: used.append(1))
    fleet.run()
    assert 5 < len(used) < SLICES * fleet.total - 5


def test_a_parameter_that_nobody_uses_keeps_no_gradient():
    fleet = Fleet(JOBS["dense"], 2).run(1, 2)
    for parts in fleet.parts:
        assert parts.module.idle.grad is None
        assert parts.agreement.without_gradient() == ["idle"]
        assert parts.module.idle.tolist() == [1.0, 1.0]


def plain_sgd(params):
    return torch.optim.SGD(params, lr=0.05)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("microbatch", [None, 9])
def test_without_exact_the_result_agrees_within_rounding(workers, merge, microbatch):
    def make():
        return job(model=lambda: torch.nn.Linear(72, 2), data=Images(), loss=flat, optimizer=momentum, clip=0.5,
                   microbatch=microbatch)  # fmt: skip

    exact = Fleet(make, 1).run()
    loose = Fleet(make, workers, exact=False, merge=merge).run()
    for one, other in zip(exact.parts[0].module.parameters(), loose.parts[0].module.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def flat(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x.flatten(1)), y)


def test_exact_sums_are_the_true_mean_gradient():
    """One step of plain descent against one backward over the whole batch in double precision."""

    def make():
        return job(model=lambda: torch.nn.Linear(72, 2), data=Images(), loss=flat, optimizer=plain_sgd, clip=None,
                   schedule=None)  # fmt: skip

    fleet = Fleet(make, 3)
    before = [p.detach().double().clone().requires_grad_() for p in fleet.parts[0].module.parameters()]
    fleet.step(1)
    from echelon.data.order import Order

    ids = Order(131, 11).ids(0, 0, 50).tolist()
    x = torch.stack([Images().x[i] for i in ids]).double().flatten(1)
    y = torch.tensor([Images()[i][1] for i in ids])
    torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, *before), y).backward()
    for old, new in zip(before, fleet.parts[0].module.parameters(), strict=True):
        assert torch.allclose(old.detach() - 0.05 * old.grad, new.double(), rtol=1e-5, atol=1e-7)


def weighted(weight_of):
    def loss(model, batch):
        x, y = batch
        losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        weight = weight_of(x)
        return (losses * weight).sum(), weight.sum()

    return loss


@pytest.mark.parametrize("exact", [True, False])
def test_a_step_that_weighs_nothing_changes_nothing_and_counts(exact):
    fleet = Fleet(lambda: job(loss=weighted(lambda x: x[:, 0] * 0)), 2, exact=exact)
    before = fleet.digest()
    outcome = fleet.step(1)
    assert isinstance(outcome, Skipped)
    assert fleet.digest() == before
    assert fleet.export().step == 1


@pytest.mark.parametrize("exact", [True, False])
def test_a_weight_below_zero_is_the_user_s_failure(exact):
    with pytest.raises(UserError, match="weights are at least 0"):
        Fleet(lambda: job(loss=weighted(lambda x: -x[:, 0].abs())), 2, exact=exact).step(1)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_names_step_slice_and_rank_and_changes_nothing(exact, value):
    fleet = Fleet(JOBS["dense"], 3, exact=exact)
    fleet.step(1)
    before = fleet.digest()
    inner = fleet.parts[1].executor._loss
    fleet.parts[1].executor._loss = lambda model, batch: inner(model, batch) * value
    with pytest.raises(Diverged) as caught:
        fleet.step(2)
    assert caught.value.step == 2
    assert caught.value.rank == 1
    assert f"slice 3 is {value}" in caught.value.why  # 7 slices on 3 workers: 3, 2, 2
    assert fleet.digest() == before


def test_a_gradient_that_is_no_number_is_found_in_exact_mode_although_the_loss_is_one():
    class Cliff(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.nan

    fleet = Fleet(JOBS["dense"], 2)
    inner = fleet.parts[1].executor._loss
    fleet.parts[1].executor._loss = lambda model, batch: Cliff.apply(inner(model, batch))
    before = fleet.digest()
    with pytest.raises(Diverged, match="a gradient is nan") as caught:
        fleet.step(1)
    assert caught.value.rank == 1
    assert fleet.digest() == before


def test_doubles_beyond_every_grid_are_a_divergence_not_an_endless_search():
    def make():
        return job(model=lambda: Dense().double(), loss=lambda m, b: classify(m, (b[0].double(), b[1])) * 1e100)

    with pytest.raises(Diverged, match="a gradient is"):
        Fleet(make, 1).step(1)


def test_gradients_that_jump_by_a_million_are_computed_again_and_stay_exact():
    def jumping():
        def loss(model, batch):
            return classify(model, batch) * scale["now"]

        scale = {"now": 1.0}
        return scale, loss

    def run(workers):
        scale, loss = jumping()
        fleet = Fleet(lambda: job(loss=loss, clip=None, optimizer=plain_sgd), workers)
        again = 0
        for number, factor in enumerate([1.0, 1e-7, 1.0, 1e-3, 1e5, 1e-30, 0.0], 1):
            scale["now"] = factor
            shares = assign(SLICES, [1.0] * workers)
            outcomes = fleet.attempt(number, shares)
            while type(outcomes[0]).__name__ == "Again":
                again += 1
                assert again < 20
                outcomes = fleet.attempt(number, shares)
        return fleet.digest(), again

    assert run(1) == run(3)
    assert run(1)[1] >= 3


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_a_mean_for_one_slice_and_a_pair_for_another_is_refused(exact, merge, workers):
    def loss(model, batch):
        value = classify(model, batch)
        return (value * 7, 7) if float(batch[0].mean()) > 0 else value

    if workers == 1 and merge and not exact:
        pytest.skip("a single micro-batch cannot differ from itself")
    with pytest.raises(UserError, match="always return the same"):
        Fleet(lambda: job(loss=loss, model=lambda: torch.nn.Linear(6, 3)), workers, exact=exact, merge=merge).run(1, 3)


def test_exact_mode_survives_parameters_of_all_kinds():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.point = torch.nn.Parameter(torch.tensor(0.5))
            self.wave = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.short = torch.nn.Linear(6, 3).bfloat16()
            self.wide = torch.nn.Linear(6, 3).double()

        def forward(self, x):
            y = self.short(x.bfloat16()).float() + self.wide(x.double()).float()
            return y * self.point + (self.wave * 1j).imag

    digests = {Fleet(lambda: job(model=Mixed, optimizer=plain_sgd), workers).run().digest() for workers in (1, 2, 3)}
    assert len(digests) == 1
