"""From what a comparison found to the most likely reason, in one sentence. Pure: no tensors, no files."""

from __future__ import annotations

from echelon.proof.findings import Findings


def likely_reason(found: Findings) -> str:
    """Causes come before what they cause: samples, then losses, gradients, clipping, the update, buffers, ranks."""
    for look in (_samples, _forward, _gradient, _clipping, _update, _buffers, _ranks):
        sentence = look(found)
        if sentence:
            return sentence
    return (
        ""
        if not found.kind
        else f"the {found.kind} of step {found.step} differs and nothing explains it; look at {found.name}"
    )


def _samples(found: Findings) -> str:
    where = "at the end of an epoch" if found.last_of_epoch else f"in step {found.step}"
    if found.missing and found.extra:
        return (
            f"the plan read other samples {where}: not {_some(found.missing)}, but {_some(found.extra)} "
            "(another order, or another cut into slices)"
        )
    if found.missing:
        return f"sample {_some(found.missing)} was skipped {where}: no worker read it"
    if found.extra:
        return f"sample {_some(found.extra)} was read more than once, or in the wrong step, {where}"
    return ""


def _forward(found: Findings) -> str:
    clues = found.clues
    if clues.changed_buffers and (not found.loss.ok or found.gradients.different):
        return (
            f"forward changes the buffer {clues.changed_buffers[0]}, so a slice's result depends on which slices the "
            "same worker computed before"
        )
    if found.loss.ok or _ignores_weights(found):
        return ""
    if clues.gradient_cause == "rounding" or clues.rounding_only:
        return (
            "losses agree within rounding but not in bits: slices were computed in another shape (merged?) or with "
            "another number of threads"
        )
    if clues.ranks_off and len(clues.ranks_off) < found.workers:
        ranks = _some(clues.ranks_off)
        if clues.draws:
            return (
                f"rank {ranks} computed other losses from the same samples and the others did not: its random numbers "
                "differ, so a seed depends on the rank"
            )
        return (
            f"rank {ranks} computed other losses from the same samples and the others did not: its parameters or its "
            "inputs differ from the other ranks'"
        )
    if clues.ranks_off:
        cause = (
            "random state is not set by slice and sample"
            if clues.draws
            else "the parameters, the inputs or the precision differ"
        )
        return f"every rank computed other losses from the same samples: {cause}"
    return (
        f"every rank's losses are right, but the step's mean is not ({found.loss.plan:.6g} instead of "
        f"{found.loss.reference:.6g}): losses are added or weighted wrongly"
    )


def _gradient(found: Findings) -> str:
    if not found.weight.ok and not _ignores_weights(found):
        return (
            f"the step's total weight is {found.weight.plan:g} and should be {found.weight.reference:g}: weights are "
            "not added up over all slices"
        )
    if not found.gradients.different:
        return ""
    which = _which(found)
    number = found.clues.gradient_number
    factor = f"{number:.4g}"
    sentences = {
        "rounding": f"{which} agree within rounding but not in bits: they were added in an order, or on a grid, that "
        "depends on who computed what",
        "own": f"{which} are those of rank 0's own slices: left out of the reduction over workers",
        "own mean": f"{which} are the mean over rank 0's own slices: left out of the reduction over workers",
        "worker mean": f"{which} are averaged by worker (a mean of the workers' means) instead of by weight",
        "weights ignored": f"{which} are a mean over slices that ignores their weights: the loss's weight was not used",
        "clipped by worker": f"{which} were clipped by each worker's local norm before they were added, instead of by "
        "the global norm",
        "stale": f"{which} are those of the step before: a stale gradient was applied",
        "slice missing": f"{which} lack slice {factor}: it was computed but not added",
        "slice twice": f"{which} contain slice {factor} twice",
        "factor": _factor_sentence(which, number, found),
        "absent": f"{which} are missing on the plan's side: the plan left them without a gradient",
        "surplus": f"{which} exist on the plan's side only; no slice gives them a gradient",
    }
    default = f"{which} differ although all losses agree: look between backward and the reduction over workers"
    cause = "weights ignored" if _ignores_weights(found) else found.clues.gradient_cause
    return sentences.get(cause, default)


def _ignores_weights(found: Findings) -> bool:
    """Where every worker merged its slices into one, a mean that ignores weights is a mean of the workers' means."""
    cause = found.clues.gradient_cause
    return cause == "weights ignored" or (cause == "worker mean" and not found.weight.ok)


def _factor_sentence(which: str, number: float, found: Findings) -> str:
    is_part = len(found.gradients.different) < found.gradients.count
    cause = "a constant factor is wrong"
    if is_part and abs(number - 2) < 1e-3:
        cause = "counted twice, as a tied parameter is that is reduced under both of its names"
    elif found.workers > 1 and abs(number - found.workers) < 1e-3:
        cause = f"summed over {found.workers} workers and not averaged"
    elif found.workers > 1 and abs(number * found.workers - 1) < 1e-3:
        cause = f"divided once too often by the number of workers ({found.workers})"
    return f"{which} are {number:.4g} times what they should be: {cause}"


def _clipping(found: Findings) -> str:
    norm = found.clip_norm
    if norm is None or norm.ok:
        if found.clues.update_cause == "not clipped":
            return "the update was made with gradients that were not clipped"
        return ""
    return (
        f"clipping used the norm {norm.plan:.6g} and the global norm over all parameters and workers is "
        f"{norm.reference:.6g}: a local norm, of one worker's part"
    )


def _update(found: Findings) -> str:
    names = (*found.parameters.different, *found.optimizer)
    schedule = ""
    off = [rate for rate in found.rates if not rate.ok]
    if off:
        schedule = (
            f"the learning rate after step {found.step} is {off[0].plan:.6g} and should be {off[0].reference:.6g}: the "
            "schedule was not stepped exactly once for the committed step (stepped per worker?)"
        )
    if not names:
        return schedule
    sentences = {
        "twice": "the same update was applied twice to the parameters",
        "none": "no update was applied to the parameters although the step has a gradient",
        "rounding": "the gradients have the same bits and the updated parameters do not: its arithmetic differs",
        "negative": "the update was applied with the wrong sign",
    }
    cause = sentences.get(found.clues.update_cause)
    if cause:
        return f"{cause} ({_some(names)})"
    if len(names) < found.parameters.count:
        return (
            f"{_some(names)} did not become what the optimizer makes of the agreed gradient; the other parameters did"
        )
    if schedule:
        return schedule
    return (
        f"the gradients agree, but the update made of them does not ({_some(names)}): optimizer state, learning rate "
        "or clipping differ"
    )


def _buffers(found: Findings) -> str:
    if not found.buffers.different:
        return ""
    names = _some(found.buffers.different)
    if found.clues.buffer_cause == "rank 0":
        return f"BatchNorm's running statistics ({names}) are those of rank 0's slices only, not shared by all workers"
    if found.clues.buffer_cause == "untouched":
        return f"BatchNorm's running statistics ({names}) were not updated"
    return (
        f"the buffers {names} differ although the parameters agree: running statistics are not applied once per slice, "
        "in slice order and in their own precision"
    )


def _ranks(found: Findings) -> str:
    if not found.ranks:
        return ""
    return f"the workers do not agree with each other on {_some(found.ranks)}: each applied an update of its own"


def _which(found: Findings) -> str:
    different, count = found.gradients.different, found.gradients.count
    if len(different) == count:
        return f"all {count} gradients" if count > 1 else f"the gradients of {different[0]}"
    return f"the gradients of {_some(different)}"


def _some(names: tuple[object, ...], most: int = 3) -> str:
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
