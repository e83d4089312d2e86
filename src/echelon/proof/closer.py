"""A closer look at the first step that differs: which of the known mistakes would have given just this?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from echelon.proof.clues import Cause, Evidence, distance, find_cause
from echelon.proof.findings import Clues, Findings
from echelon.proof.follow import Follower, Moment


def look_closer(follower: Follower, found: Findings, *, draws: bool) -> Findings:
    """The same findings with clues; `follower` has just followed that step."""
    moment = follower.moment
    assert moment is not None
    cause = _gradient_cause(follower, moment, found)
    clues = Clues(
        draws=draws,
        ranks_off=_ranks_off(moment, found),
        gradient_cause=cause.word,
        gradient_number=cause.number,
        update_cause=_update_cause(follower, moment, found),
        buffer_cause=_buffer_cause(follower, moment, found),
        changed_buffers=tuple(sorted(frozenset().union(*(c.changed for c in moment.computed)))),
    )
    return replace(found, clues=clues)


def _ranks_off(moment: Moment, found: Findings) -> tuple[int, ...]:
    """Ranks whose slices have another summed loss than in one process."""
    scale = abs(moment.mean.weight) or 1.0
    off = []
    for rank, (start, stop) in enumerate(moment.entry["shares"]):
        plan = math.fsum(total for total, _ in moment.entry["losses"][start:stop])
        mine = math.fsum(c.total for c in moment.computed if start <= c.index < stop)
        if not abs(plan - mine) <= max(found.loss.tolerance * scale, 1e-12 * abs(mine)):
            off.append(rank)
    return tuple(off)


def _gradient_cause(follower: Follower, moment: Moment, found: Findings) -> Cause:
    if not found.gradients.different:
        return Cause()
    number = moment.task.number
    plan = {name: g.to(follower.reference.device) for name, g in follower.record.tensors(number, "gradient").items()}
    previous = follower.record.tensors(number - 1, "gradient") if number > 1 else {}
    tolerance: Callable[[str], float] = lambda name: moment.tolerances.get(name, 0.0)  # noqa: E731
    evidence = Evidence(
        parts={c.index: part for c, part in zip(moment.computed, follower.contributions(moment.computed), strict=True)},
        weights={c.index: c.weight for c in moment.computed},
        mean=moment.mean.gradient,
        shares=[range(start, stop) for start, stop in moment.entry["shares"]],
        previous={name: g.to(follower.reference.device) for name, g in previous.items()},
        clip=found.clip,
        tolerance=tolerance,
    )
    return find_cause(plan, found.gradients.different, evidence)


def _update_cause(follower: Follower, moment: Moment, found: Findings) -> str:
    """Try the known mistakes on the parameters as they were before the step."""
    if not found.parameters.different:
        return ""
    reference, number = follower.reference, found.step
    theirs = follower.record.tensors(number, "model")
    gradients = {n: g.to(reference.device) for n, g in follower.record.tensors(number, "gradient").items()}
    right = {name: tensor.clone() for name, tensor in reference.model().items()}
    names = found.parameters.different

    def gap(guess: dict[str, Tensor]) -> float:
        return max(distance(theirs[name], guess[name]) for name in names)

    wrong_by = max(gap(right), 1e-300)
    if gap(moment.model) <= 0.01 * wrong_by:
        return "none"
    mirrored = {name: 2 * moment.model[name] - right[name] for name in names}
    if gap(mirrored) <= 0.01 * wrong_by:
        return "negative"
    for word in ("twice", "not clipped"):
        reference.load(moment.model)
        reference.optimizer.load_state_dict(moment.optimizer)
        _make_mistake(follower, gradients, word)
        guess = {name: tensor.clone() for name, tensor in reference.model().items()}
        reference.load(right)
        if gap(guess) <= 0.01 * wrong_by:
            return word
    scale = max(float(right[name].abs().max()) for name in names if right[name].numel())
    return "rounding" if wrong_by <= 1e-5 * scale and follower.reference.exact else ""


def _make_mistake(follower: Follower, gradients: dict[str, Tensor], word: str) -> None:
    """Only the optimizer and the model: a schedule is left as it is."""
    reference = follower.reference
    rates = [group["lr"] for group in reference.optimizer.param_groups if "lr" in group]
    clip = reference.job.clip if word == "twice" else None
    norm = math.sqrt(sum(float(g.abs().double().square().sum()) for g in gradients.values()))
    factor = min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0
    for _ in range(2 if word == "twice" else 1):
        for name, parameter in reference.parameters.items():
            parameter.grad = gradients[name] * factor if name in gradients else None
        reference.optimizer.step()
        reference.optimizer.zero_grad(set_to_none=True)
    for group, rate in zip((g for g in reference.optimizer.param_groups if "lr" in g), rates, strict=True):
        group["lr"] = rate


def _buffer_cause(follower: Follower, moment: Moment, found: Findings) -> str:
    """Running statistics from rank 0's slices alone, or left as they were."""
    names = found.buffers.different
    if not names:
        return ""
    reference = follower.reference
    theirs = follower.record.tensors(found.step, "model")
    right = {name: tensor.clone() for name, tensor in reference.model().items()}
    if all(distance(theirs[name], moment.model[name]) == 0 for name in names):
        return "untouched"
    start, stop = moment.entry["shares"][0]
    reference.load(moment.model)
    reference.norms.apply(c.row for c in moment.computed if start <= c.index < stop)
    guess = {name: tensor.clone() for name, tensor in reference.model().items()}
    reference.load(right)
    near = all(
        distance(theirs[n], guess[n]) <= max(1e-6, 0.01 * distance(right[n], guess[n])) for n in names if n in guess
    )
    return "rank 0" if near else ""
