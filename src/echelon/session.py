"""One training run on one worker, from meeting the others to the result it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.assemble import Parts, Prepared, assemble
from echelon.checkpoint import digest, write_model
from echelon.comm import Group
from echelon.errors import Diverged
from echelon.events import Event, event, rewind
from echelon.job import ENDLESS
from echelon.layout import model_tensors, too_small
from echelon.loop import StepDone, train
from echelon.plan import Plan
from echelon.record import Recorder
from echelon.reporting import Line, Reporter, list_some, median_step_ms, write_job
from echelon.request import Request
from echelon.result import Result
from echelon.resume import Checkpoints, Resumed, identity
from echelon.roster import agree_on_weights, describe, fingerprint, meet, remarks
from echelon.runs import set_aside
from echelon.sent import add_up
from echelon.slices import Course


class Session:
    """Opened with what a worker has prepared, told of every committed step, closed with a result."""

    def __init__(self, request: Request, prepared: Prepared, group: Group, line: Line) -> None:
        self._request = request
        self._prepared = prepared
        self._group = group
        self._line = line
        self._seconds: list[float] = []
        self._metrics: dict[str, float] = {}
        self._evaluated_at = -1
        group.notify = lambda message: line.show(event("waiting", message=message))
        if request.one_thread:
            torch.set_num_threads(1)  # whatever the user's code has set
        hosts = meet(group, request, prepared)
        line.stop_requested()  # all are here, so from now on a request to stop has somebody to obey it
        self._name: str = hosts[0]["run"]
        self._run = Path(request.base, self._name)  # the job's file may have gone to another folder
        agree_on_weights(group, prepared.module)
        self._recorder = Recorder(Path(request.record), group) if request.record else None
        self.parts: Parts = assemble(
            prepared,
            group,
            probe=self._recorder.gradients if self._recorder else None,
            seen=self._recorder.samples if self._recorder else None,
        )
        job, size = prepared.job, prepared.course.size
        job, size = prepared.job, prepared.course.size
        self._checkpoints = Checkpoints(
            self._run,
            self._name,
            identity(job, size, prepared.exact, hosts[0]["data"]),
            job.keep,
            group,
            self.parts.agreement,
            tell=self._tell,
        )
        resumed = self._checkpoints.resume() if request.resume else self._begin_anew()
        self._loss = resumed.loss
        if request.resume and group.rank == 0:
            rewind(self._run / "events.jsonl", resumed.step)
        self._report = Reporter(self._run, group.rank, line)
        self._open(hosts, resumed)
        self._began_at = time.time()
        self._began = self._finished = time.perf_counter()

    def _begin_anew(self) -> Resumed:
        moved = set_aside(Path(self._name), self._request.base) if self._group.rank == 0 else None
        return Resumed(messages=(f"an earlier run was there; it is now {moved}",) if moved else ())

    def _open(self, hosts: list[dict[str, Any]], resumed: Resumed) -> None:
        prepared, course = self._prepared, self._prepared.course
        if self._group.rank == 0:
            write_job(self._run, describe(self._request, prepared, hosts, resumed.step))
        for message in (
            *resumed.messages,
            *remarks(hosts),
            *too_small(prepared.module, course),
            *_surplus(resumed, course),
        ):
            self._report(event("warning", message=message))
        self._report(_start(self._request, prepared, self._group, self._name))
        for host in hosts:
            self._report(event("worker", rank=host["rank"], pid=host["pid"], host=host["host"]))
        if resumed.step:
            self._report(event("resume", step=resumed.step, path=str(Path(self._name, "checkpoints"))))

    def train(self) -> bool:
        """Run the loop to the end, or until somebody asks to stop (True)."""
        self.begin()
        parts = self.parts
        try:
            return train(
                parts.executor, parts.agreement, parts.turns(), self._group.rank, self.stop_requested, [self.after]
            )
        except Diverged:
            self.save_before_failing()
            raise

    def begin(self) -> None:
        """The first step is about to begin."""
        self._began_at = time.time()
        self._began = self._finished = time.perf_counter()

    def stop_requested(self) -> bool:
        return self._line.stop_requested()

    def after(self, done: StepDone) -> None:
        """What is due once a step is committed."""
        self._finished = time.perf_counter()
        if not self._seconds:
            self._checkpoints.check()
        self._note(done)
        if self._recorder is not None:
            self._recorder.step(done, self.parts.agreement.export())
        job, step = self._prepared.job, done.step.number
        if job.evaluate is not None and step % job.evaluate.every == 0:
            self._evaluate(step)
        if job.checkpoint_every and step % job.checkpoint_every == 0:
            self.save(wait=False)
        self._checkpoints.tell_finished()

    def _note(self, done: StepDone) -> None:
        self._loss = done.outcome.loss
        self._seconds.append(done.seconds)
        if self._group.rank != 0:
            return
        first = len(self._seconds) == 1
        idle = self.parts.agreement.without_gradient() if first and done.outcome.weight else []
        if idle:
            self._report(event("warning", message=f"no gradient for {list_some(idle)}: unused in forward?"))
        moved = sorted(self.parts.microbatches.changed_parameters) if first else []
        if moved:
            why = "once a slice, on whichever worker computes it; change it after the step"
            self._report(event("warning", message=f"forward changes {list_some(moved)}, {why}"))
        record = event(
            "step",
            step=done.step.number,
            loss=done.outcome.loss,
            samples=done.step.samples,
            seconds=done.seconds,
            bytes=done.outcome.sent_bytes,
            shares={str(rank): len(share) for rank, share in enumerate(done.shares)},
        )
        self._report(record, important=first or done.outcome.stop or done.step.number == self.parts.course.total)

    def _evaluate(self, step: int) -> None:
        if self.parts.evaluation is None or self._evaluated_at == step:
            return
        self._evaluated_at = step
        self._metrics = self.parts.evaluation.run()
        self._report(event("evaluate", step=step, metrics=self._metrics))

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint of the committed state, unless there is one already."""
        self._checkpoints.save(self._loss, wait=wait)

    def save_before_failing(self) -> None:
        """Before the reason why a step cannot be committed is told, what was committed is saved."""
        self._checkpoints.save_before_failing(self._loss)

    def _tell(self, record: Event) -> None:
        self._report(record)  # which is there only once the folder is ready for it

    def finish(self, *, stopped: bool) -> Result:
        """Everything that is left to write, and the result, which every rank knows."""
        committed = self.parts.agreement.committed
        if not stopped:
            self._evaluate(committed)
        self.save()
        module = self._prepared.module
        sent = add_up(self._group)
        self._report(sent)
        prints = self._group.gather(fingerprint(module), "comparing final weights")
        if len(set(prints)) > 1:
            remedy = (
                ": something in the job depends on the worker" if self._request.exact else "; --exact keeps them equal"
            )
            self._report(event("warning", message=f"the workers' weights differ in their last bits{remedy}"))
        own = digest(model_tensors(module)) if self._group.rank == 0 else ""
        code = self._group.gather(own, "sharing the digest")[0]
        if self._group.rank == 0:
            write_model(self._run / "model.safetensors", model_tensors(module))
        result = Result(
            steps=committed,
            samples=self.parts.course.samples_before(committed + 1),
            loss=self._loss,
            metrics=self._metrics,
            digest=code,
            seconds=self._finished - self._began,
            step_ms=median_step_ms(self._seconds),
            start_ms=max(0.0, (self._began_at - self._request.started) * 1000),
            bytes_sent=sent["bytes"],
            plan=str(Plan.parse(self._request.plan)),
            workers=self._group.size,
            run=self._name,
        )
        self._report(event("stopped" if stopped else "end", **result.to_dict()))
        return result

    def close(self) -> None:
        """Let go of everything: files, threads, hooks."""
        try:
            self._checkpoints.close()
        finally:
            self._report.close()
            self.parts.agreement.detach()
            del self.parts


def _start(request: Request, prepared: Prepared, group: Group, run: str) -> Event:
    job, course = prepared.job, prepared.course
    endless = job.epochs == ENDLESS
    return event(
        "start",
        plan=str(Plan.parse(request.plan)),
        workers=group.size,
        steps=None if endless else course.total,
        run=run,
        exact=request.exact,
        samples_total=None if endless else course.samples_before(course.total + 1),
        parameters=sum(p.numel() for p in prepared.module.parameters()),
        batch=job.batch,
        slices=job.slices,
        device=str(group.device),
    )


def _surplus(resumed: Resumed, course: Course) -> list[str]:
    if resumed.step <= course.total:
        return []
    return [f"the run has {resumed.step} steps already and {course.total} were asked for; nothing is left to train"]


Open = Callable[[Prepared], Session]
