"""(job, plan, place) -> the parts of one worker. The only file that knows every concrete class.

Assembly can run again in the same process, on another number of workers, from the state an earlier one exported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.agree import Replicated, Update
from echelon.agree.grid import MOST_SLICES
from echelon.agree.replicated import Probe
from echelon.comm import Group
from echelon.data.order import Order
from echelon.data.reader import Reader
from echelon.data.stream import Seen, Shuffled, Straight
from echelon.errors import ConfigError, users_code
from echelon.job import Job
from echelon.layout import Microbatches, RunningStatistics, WholeModel, build_module, check_module, parameters_of
from echelon.layout.evaluation import Evaluation
from echelon.loop import Turn
from echelon.plan import Plan
from echelon.plan.available import resolve_available
from echelon.randomness import Generators, derive
from echelon.slices import Course, assign


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a worker can make before it has met the others; whatever is wrong with a job shows here."""

    job: Job
    plan: Plan
    course: Course
    exact: bool
    merge: bool
    reader: Reader
    evaluation_reader: Reader | None
    module: nn.Module


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one worker, ready for the loop."""

    microbatches: Microbatches
    executor: WholeModel
    agreement: Replicated
    optimizer: Optimizer
    shares: tuple[range, ...]
    course: Course
    evaluation: Evaluation | None
    module: nn.Module

    def turns(self) -> Iterator[Turn]:
        """The steps that are left, from the agreement's last committed one."""
        for number in range(self.agreement.committed + 1, self.course.total + 1):
            yield Turn(step=self.course.step(number), shares=self.shares)


def check_plan(job: Job, plan: Plan, workers: int, exact: bool) -> Plan:
    """The plan on so many workers, or the term that cannot work and why."""
    resolved = resolve_available(plan, workers)
    if workers > job.slices:
        raise ConfigError(
            "workers",
            f"{workers} workers cannot share {job.slices} slices; "
            f"use slices={workers} or more in the job, or --workers {job.slices}",
        )
    if exact and job.compile:
        raise ConfigError(
            "exact",
            "compiled kernels depend on the shapes a worker happened to see first; "
            "set compile=False, or train without --exact",
        )
    if exact and job.slices > MOST_SLICES:
        raise ConfigError("slices", f"{job.slices} cannot be summed exactly; use at most {MOST_SLICES} with --exact")
    return resolved


def prepare(job: Job, plan: Plan, *, workers: int, device: torch.device, exact: bool, merge: bool = True) -> Prepared:
    """Build the dataset and the model, and check everything that can be checked alone."""
    plan = check_plan(job, plan, workers, exact)
    module = build_module(job.model, job.seed, device)
    return prepare_module(job, plan, module, workers=workers, device=device, exact=exact, merge=merge)


def prepare_module(
    job: Job, plan: Plan, module: nn.Module, *, workers: int, device: torch.device, exact: bool, merge: bool
) -> Prepared:
    """The same for a module that exists already."""
    plan = check_plan(job, plan, workers, exact)
    check_module(module)
    reader = Reader(_dataset(job.data, "data", job.seed), job.collate, job.seed)
    evaluation_reader = None
    if job.evaluate is not None:
        term = "evaluate.data"
        dataset = _dataset(job.evaluate.data, term, job.seed)
        evaluation_reader = Reader(dataset, job.collate, job.seed, term=term, use="evaluate on")
    return Prepared(
        job=job,
        plan=plan,
        course=Course(size=len(reader), batch=job.batch, slices=job.slices, steps=job.steps, epochs=job.epochs),
        exact=exact,
        merge=merge,
        reader=reader,
        evaluation_reader=evaluation_reader,
        module=module.to(device).train(),
    )


def assemble(prepared: Prepared, group: Group, *, probe: Probe | None = None, seen: Seen | None = None) -> Parts:
    """The parts of this worker among `group`."""
    job, course, module = prepared.job, prepared.course, prepared.module
    statistics = RunningStatistics(module, job.slices)
    update = Update(parameters_of(module), job.optimizer, job.schedule, clip=job.clip, exact=prepared.exact)
    microbatches = Microbatches(
        module,
        Shuffled(prepared.reader, Order(course.size, job.seed), seen),
        statistics,
        partial(Generators.of, module, job.loss),
        seed=job.seed,
        device=group.device,
        rank=group.rank,
        merge=prepared.merge,
        exact=prepared.exact,
        microbatch=job.microbatch,
    )
    return Parts(
        microbatches=microbatches,
        executor=WholeModel(
            module,
            job.loss,
            microbatches,
            device=group.device,
            rank=group.rank,
            bf16=job.precision == "bf16",
            compiled=job.compile,
        ),
        agreement=Replicated(module, update, statistics, group, slices=job.slices, exact=prepared.exact, probe=probe),
        optimizer=update.optimizer,
        shares=assign(job.slices, [1.0] * group.size),
        course=course,
        evaluation=_evaluation(prepared, group),
        module=module,
    )


def _evaluation(prepared: Prepared, group: Group) -> Evaluation | None:
    job, reader = prepared.job, prepared.evaluation_reader
    if job.evaluate is None or reader is None:
        return None
    return Evaluation(
        prepared.module,
        job.evaluate.metric,
        Straight(reader),
        group,
        size=len(reader),
        batch=job.evaluate.batch,
        seed=job.seed,
        bf16=job.precision == "bf16",
    )


def _dataset(data: Any, term: str, seed: int) -> Any:
    """The dataset itself, or what the callable that was given returns, made under the job's own random state."""
    if isinstance(data, type) or (not hasattr(data, "__getitem__") and callable(data)):
        Generators.of().set(derive(seed, term))
        with users_code(f"making {term}"):
            return data()
    return data
