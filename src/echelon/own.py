"""A training loop of the user's own: `echelon.launch(main, ...)` calls `main(run)` on every worker.

    def main(run):
        model, optimizer, batches = run.prepare(Net(), lambda p: torch.optim.AdamW(p), dataset, batch=256)
        for batch in batches:                       # this worker's share of each step
            run.backward(loss(model, batch))        # a mean over the samples, or (sum, weight)
            optimizer.step()                        # commits once the worker's share of the step is in

In exact mode, and with BatchNorm, a step's share comes slice by slice: the loop's body runs once a slice, and
`optimizer.step()` acts on the last one. From the last `run.backward` of a step to its `optimizer.step()`, `.grad` holds
the agreed gradients, the same on every worker, to be looked at or clipped. A schedule is handed to `prepare`, which
steps it once a committed step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.agree import Again, Applied, Skipped
from echelon.assemble import Prepared, prepare_module
from echelon.errors import ConfigError, Diverged, Unwinding, UserError
from echelon.job import ENDLESS, Job
from echelon.layout import SliceLoss, StepResult
from echelon.loop import StepDone, Turn
from echelon.plan import Plan
from echelon.session import Open, Session


class StopAsked(Unwinding):
    """Unwinds the user's loop when training was asked to stop."""


class Run:
    """What `main` is given: who and where this worker is, and the parts of a loop."""

    def __init__(
        self,
        *,
        rank: int,
        workers: int,
        device: torch.device,
        plan: Plan,
        exact: bool,
        merge: bool,
        session: Open,
        steps: int | None = None,
    ) -> None:
        self.rank = rank
        self.workers = workers
        self.device = device
        self.plan = plan
        self.exact = exact
        self._merge = merge
        self._steps = steps
        self._open_session = session
        self.session: Session | None = None
        self._loop: _Loop | None = None

    def prepare(
        self,
        module: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        dataset: Any,
        *,
        batch: int,
        steps: int | None = None,
        epochs: int | None = None,
        slices: int = 8,
        seed: int = 0,
        clip: float | None = None,
        schedule: Callable[[Optimizer], LRScheduler] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        checkpoint_every: int | None = None,
        microbatch: int | None = None,
    ) -> tuple[nn.Module, OwnOptimizer, Iterable[Any]]:
        """The model on this worker's device, an optimizer whose `step` commits, and this worker's batches.

        One pass over the batches is the whole training when `steps` or `epochs` is given; otherwise the n-th pass is
        the n-th epoch, or after a resume what is left of it.
        """
        if self.session is not None:
            raise ConfigError("prepare", "was called twice; one run trains one model")
        if self._steps is not None:  # what the command line says overrides the program
            steps, epochs = self._steps, None
        endless = steps is None and epochs is None
        job = Job(
            model=lambda: module,
            loss=_no_loss,
            data=dataset,
            optimizer=make_optimizer,
            batch=batch,
            steps=steps,
            epochs=ENDLESS if endless else epochs,
            slices=slices,
            seed=seed,
            clip=clip,
            schedule=schedule,
            collate=collate,
            checkpoint_every=checkpoint_every,
            microbatch=microbatch,
        )
        prepared: Prepared = prepare_module(
            job, self.plan, module, workers=self.workers, device=self.device, exact=self.exact, merge=self._merge
        )
        self.session = self._open_session(prepared)
        self._loop = _Loop(self.session, self.rank, one_epoch=endless)
        return prepared.module, OwnOptimizer(self.session.parts.optimizer, self._loop), self._loop

    def check_ended(self) -> None:
        """Complain if the user's loop left a step half computed."""
        if self._loop is not None:
            self._loop.check_ended()

    def backward(self, loss: Any) -> None:
        """Backward of the loss of the batch just read: a mean over its samples, or (sum, weight)."""
        if self._loop is None:
            raise ConfigError("backward", "was called before run.prepare")
        self._loop.backward(loss)


class OwnOptimizer:
    """The user's optimizer, whose `step` commits: one agreed update on every worker. Everything else is passed
    through.
    """

    def __init__(self, optimizer: Optimizer, loop: _Loop) -> None:
        self._optimizer = optimizer
        self._loop = loop

    def step(self, closure: None = None) -> None:
        if closure is not None:
            raise ConfigError("optimizer", "step(closure) would compute the loss again; call run.backward, then step()")
        self._loop.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Every step begins without gradients anyway; what a step has gathered so far is kept."""
        self._optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Loop:
    """The loop turned inside out: reading a batch begins what `step` ends."""

    def __init__(self, session: Session, rank: int, *, one_epoch: bool) -> None:
        self._session = session
        self._parts = session.parts
        self._rank = rank
        self._one_epoch = one_epoch
        self._passes = 0
        self._before = 0.0
        self._turn: Turn | None = None
        self._result = StepResult()
        self._group: Any = None
        self._is_last = False
        self._outcome: Applied | Skipped | Again | None = None
        self._backward_done = False
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._agreed: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        """Steps of one pass over the batches."""
        course = self._parts.course
        return course.steps_per_epoch if self._one_epoch else course.total

    def __iter__(self) -> Iterator[Any]:
        if not self._before:
            self._session.begin()
            self._before = time.perf_counter()
        self._passes += 1
        last = self._passes * self._parts.course.steps_per_epoch if self._one_epoch else self._parts.course.total
        for turn in self._parts.turns():
            if turn.step.number > last:
                return
            outcome = yield from self._attempt(turn)
            while isinstance(outcome, Again):
                outcome = yield from self._attempt(turn)

    def _attempt(self, turn: Turn) -> Generator[Any, None, Applied | Skipped | Again]:
        work, agreement = self._parts.microbatches, self._parts.agreement
        self._turn, self._result, self._outcome = turn, StepResult(), None
        self._kept, self._agreed = [], None
        agreement.begin(turn.step, self._result, self._session.stop_requested)
        work.begin()
        groups = work.groups(turn.step, turn.shares[self._rank])
        try:
            for position, group in enumerate(groups):
                self._group, self._is_last, self._backward_done = group, position == len(groups) - 1, False
                yield work.read(turn.step, group)
                if not self._backward_done:
                    raise UserError(self._rank, "the loop went on to the next batch without run.backward(loss)")
        finally:
            work.end()
        if not groups:
            with agreement.window(True):
                pass
            self._commit()
        return self._outcome_or_complain()

    def _outcome_or_complain(self) -> Applied | Skipped | Again:
        if self._outcome is None:
            raise UserError(self._rank, "the loop went on to the next batch without optimizer.step()")
        return self._outcome

    def backward(self, value: Any) -> None:
        if self._turn is None or self._group is None or self._backward_done:
            raise UserError(self._rank, "run.backward(loss) belongs once to each batch")
        work, step = self._parts.microbatches, self._turn.step
        loss: SliceLoss = work.account(step, self._group, value, self._result)
        self._put_back()
        work.backward(loss, self._parts.agreement.window(self._is_last))
        self._backward_done = True
        if self._is_last:
            self._prepare()
        else:
            self._set_aside()

    def _set_aside(self) -> None:
        """Until the share is complete there is nothing that a clip, or `model.zero_grad()`, may act upon."""
        parameters = self._parts.module.parameters()
        self._kept = [(p, p.grad) for p in parameters if p.requires_grad and p.grad is not None]
        for parameter, _ in self._kept:
            parameter.grad = None

    def _put_back(self) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []

    def step(self) -> None:
        if not self._backward_done:
            raise UserError(self._rank, "optimizer.step() was called before run.backward(loss)")
        if self._is_last and self._outcome is None:
            self._check_untouched()
            self._commit()

    def _prepare(self) -> None:
        """Agree now, so that what is in `.grad` until the step is what the step will apply."""
        assert self._turn is not None
        self._parts.microbatches.end()
        with self._saving_what_is_whole():
            self._outcome = self._parts.agreement.prepare(self._turn.step, self._turn.shares)
        if any(not self._parts.microbatches.groups(self._turn.step, share) for share in self._turn.shares):
            self._agreed = self._gradients()

    def _gradients(self) -> list[tuple[int, int]]:
        return [(id(p.grad), p.grad._version) for p in self._parts.module.parameters() if p.grad is not None]

    def _check_untouched(self) -> None:
        """Where a worker has no part in a step, the loop's body does not run there: it would not change the same."""
        if self._agreed is not None and self._agreed != self._gradients():
            raise UserError(
                self._rank,
                f"the loop changed the gradients of step {self._number}, in which some workers have no samples and "
                "could not do the same; use clip= in run.prepare, fewer workers, or data that divides more evenly",
            )

    @property
    def _number(self) -> int:
        return self._turn.step.number if self._turn else 0

    def check_ended(self) -> None:
        """Complain if some of a step was computed and then the loop was left."""
        if self._outcome is None and self._result.losses:
            raise UserError(
                self._rank,
                f"the loop ended in the middle of step {self._number}: its share of a step comes in parts (exact mode, "
                "BatchNorm, microbatch=), and some are still to come; leave the loop after the last one's step()",
            )

    @contextmanager
    def _saving_what_is_whole(self) -> Iterator[None]:
        try:
            yield
        except Diverged:
            self._session.save_before_failing()
            raise

    def _commit(self) -> None:
        assert self._turn is not None
        with self._saving_what_is_whole():
            self._outcome = self._parts.agreement.commit(self._turn.step, self._turn.shares)
        if not isinstance(self._outcome, Again):
            self._after(self._turn, self._outcome)

    def _after(self, turn: Turn, outcome: Applied | Skipped) -> None:
        """At once, not when the next batch is asked for: the user's loop may end here."""
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        self._session.after(StepDone(step=turn.step, outcome=outcome, shares=turn.shares, seconds=seconds))
        if outcome.stop:
            raise StopAsked


def _no_loss(*_: Any) -> Any:
    raise AssertionError("a loop of one's own computes its own loss")
