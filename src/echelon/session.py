"""One training run on one worker: prepare alone, meet the others, train, leave a result behind."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from echelon.assemble import Parts, Prepared, assemble, prepare
from echelon.checkpoint import Keeper, digest, write_model
from echelon.comm import Group, Meeting, join, leave
from echelon.errors import ConfigError, Diverged, EchelonError, StorageFailed, UserError
from echelon.events import Event, EventLog, event, rewind
from echelon.job import Job
from echelon.loop import StepDone, train
from echelon.place import Place, arithmetic
from echelon.plan import Plan
from echelon.record import Recorder
from echelon.request import Request
from echelon.result import Result
from echelon.resume import check_identity, identity, share_state

SHOW_EVERY_S = 0.1


class Line(Protocol):
    """A worker's line to whoever started it: a launcher, or torchrun and the terminal."""

    def meet(self) -> None:
        """Say that this worker is ready and wait until all are."""

    def show(self, record: Event) -> None: ...

    def stop_requested(self) -> bool: ...


class Reporter:
    """Rank 0 writes every event to the run folder and shows it; steps are shown a few times a second at most."""

    def __init__(self, run: Path, rank: int, line: Line) -> None:
        self._log = EventLog(run / "events.jsonl") if rank == 0 else None
        self._line = line
        self._shown = 0.0

    def __call__(self, record: Event, important: bool = True) -> None:
        if self._log is None:
            return
        self._log(record)
        if important or record["time"] - self._shown >= SHOW_EVERY_S:
            self._shown = record["time"]
            self._line.show(record)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def run_session(
    request: Request, place: Place, meeting: Callable[[], Meeting], load: Callable[[], Job], line: Line
) -> dict[str, Any]:
    """Train to the end (or to a stop). Returns `{"result": ..., "stopped": ...}`, the same on every rank."""
    torch.set_num_threads(place.threads(request.exact))
    job = _job_of(request, load())
    device = place.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(request.exact)
    prepared = prepare(
        job, Plan.parse(request.plan), workers=place.workers, device=device, exact=request.exact, merge=request.merge
    )
    line.meet()
    group = join(meeting(), device, place.backend(device))
    try:
        return _Session(request, place, prepared, group, line).run()
    except EchelonError as error:
        raise _with_rank(error, place.rank) from error
    finally:
        leave()


def _job_of(request: Request, job: Any) -> Job:
    if not isinstance(job, Job):
        raise ConfigError("job", f"is {type(job).__name__} and must be an echelon.Job")
    if request.steps is None:
        return job
    fields = {name: getattr(job, name) for name in job.__dataclass_fields__}
    return Job(**{**fields, "steps": request.steps, "epochs": None})


def _with_rank(error: EchelonError, rank: int) -> EchelonError:
    if isinstance(error, UserError) and error.rank < 0:
        return UserError(rank, error.why, error.trace)
    return error


class _Session:
    """What one run holds between joining and leaving."""

    def __init__(self, request: Request, place: Place, prepared: Prepared, group: Group, line: Line) -> None:
        self._request = request
        self._place = place
        self._prepared = prepared
        self._group = group
        self._line = line
        self._run = Path(request.out)
        self._step_seconds: list[float] = []
        self._last: StepDone | None = None
        self._metrics: dict[str, float] = {}
        self._evaluated_at = -1
        self._warned = False
        self._begun = 0.0
        self._finished = 0.0

    def run(self) -> dict[str, Any]:
        hosts = self._meet()
        self._agree_on_weights()
        recorder = Recorder(Path(self._request.record), self._group) if self._request.record else None
        self._parts: Parts = assemble(
            self._prepared,
            self._group,
            probe=recorder.gradients if recorder else None,
            seen=recorder.samples if recorder else None,
        )
        self._keeper = Keeper(self._run / "checkpoints", self._prepared.job.keep) if self._group.rank == 0 else None
        try:
            resumed = self._resume()
            self._report = Reporter(self._run, self._group.rank, self._line)
            self._open(hosts, resumed)
            stopped = self._train(recorder)
            return {"result": self._close(stopped).to_dict(), "stopped": stopped}
        finally:
            if self._keeper is not None:
                self._keeper.close()
            self._parts.agreement.detach()
            del self._parts

    def _meet(self) -> list[dict[str, Any]]:
        mine = {"rank": self._group.rank, "pid": os.getpid(), "host": socket.gethostname(), "arithmetic": arithmetic()}
        everybody = self._group.gather(mine, "meeting the other workers")
        first = everybody[0]["arithmetic"]
        for other in everybody if self._request.exact else ():
            for what, value in other["arithmetic"].items():
                if value != first[what]:
                    raise ConfigError(
                        "exact",
                        f"rank {other['rank']} computes with {what} {value} and rank 0 with {first[what]}; "
                        "equal bits need the same on all workers. Use equal machines, or train without --exact",
                    )
        return everybody

    def _agree_on_weights(self) -> None:
        """Every worker made the model itself; where that gave other weights (a seed of the user's own), rank 0's count."""
        module = self._prepared.module
        prints = self._group.gather(fingerprint(module), "comparing initial weights")
        if len(set(prints)) > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                self._group.broadcast(tensor.data, "sharing initial weights")

    def _resume(self) -> int:
        """Go on from the newest sound checkpoint; the number of steps it holds."""
        if not self._request.resume:
            return 0
        messages: list[str] = []
        found = self._keeper.latest(messages.append) if self._keeper is not None else None
        state = share_state(found, self._group)
        for message in messages:
            self._line.show(event("warning", message=message))
        if state is None:
            if self._group.rank == 0:
                self._line.show(event("warning", message=f"nothing to resume in {self._run}; starting anew"))
                rewind(self._run / "events.jsonl", 0)
            return 0
        check_identity(state, self._prepared.job, self._prepared.course.size)
        self._parts.agreement.restore(state)
        if self._group.rank == 0:
            rewind(self._run / "events.jsonl", state.step)
        return state.step

    def _open(self, hosts: list[dict[str, Any]], resumed: int) -> None:
        job, course = self._prepared.job, self._prepared.course
        if self._group.rank == 0:
            write_job(self._run, self._request, self._prepared, hosts)
        if self._request.moved:
            self._report(event("warning", message=f"an earlier run was there; it is now {self._request.moved}"))
        self._report(
            event(
                "start",
                plan=str(Plan.parse(self._request.plan)),
                workers=self._group.size,
                steps=course.total,
                run=str(self._run),
                exact=self._request.exact,
                samples_total=course.samples_before(course.total + 1),
                parameters=sum(p.numel() for p in self._prepared.module.parameters()),
                batch=job.batch,
                slices=job.slices,
                device=str(self._group.device),
            )
        )
        for host in hosts:
            self._report(event("worker", rank=host["rank"], pid=host["pid"], host=host["host"]))
        if resumed:
            self._report(event("resume", step=resumed, path=str(self._run / "checkpoints")))

    def _train(self, recorder: Recorder | None) -> bool:
        parts = self._parts
        after: list[Callable[[StepDone], None]] = [self._note, self._evaluate_on_time, self._save_on_time]
        if recorder is not None:
            after.append(lambda done: recorder.step(done, parts.agreement.export()))
        self._begun = time.time()
        began = time.perf_counter()
        try:
            stopped = train(
                parts.executor, parts.agreement, parts.turns(), self._group.rank, self._line.stop_requested, after
            )
        except Diverged:
            self._save()
            raise
        self._finished = time.perf_counter() - began
        return stopped

    def _note(self, done: StepDone) -> None:
        self._last = done
        self._step_seconds.append(done.seconds)
        outcome = done.outcome
        if self._group.rank != 0:
            return
        if not self._warned:
            self._warned = True
            idle = self._parts.agreement.without_gradient()
            if idle and outcome.weight:
                names = ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
                self._report(event("warning", message=f"no gradient for {names}: unused in forward?"))
        record = event(
            "step",
            step=done.step.number,
            loss=outcome.loss,
            samples=done.step.samples,
            seconds=done.seconds,
            bytes=outcome.sent_bytes,
            shares={str(rank): len(share) for rank, share in enumerate(done.shares)},
        )
        is_edge = len(self._step_seconds) == 1 or done.step.number == self._parts.course.total or outcome.stop
        self._report(record, important=is_edge)

    def _evaluate_on_time(self, done: StepDone) -> None:
        every = self._prepared.job.evaluate.every if self._prepared.job.evaluate else 0
        if every and done.step.number % every == 0:
            self._evaluate(done.step.number)

    def _evaluate(self, step: int) -> None:
        if self._parts.evaluation is None or self._evaluated_at == step:
            return
        self._evaluated_at = step
        self._metrics = self._parts.evaluation.run()
        self._report(event("evaluate", step=step, metrics=self._metrics))

    def _save_on_time(self, done: StepDone) -> None:
        every = self._prepared.job.checkpoint_every
        if every and done.step.number % every == 0:
            self._save(wait=False)

    def _save(self, wait: bool = True) -> None:
        if self._keeper is None:
            return
        state = self._parts.agreement.export()
        if wait:
            self._keeper.wait()
        if state.step in self._keeper.steps():
            return
        state.values |= identity(self._prepared.job, self._prepared.course.size, self._request.exact)
        began = time.perf_counter()
        if wait:
            self._keeper.save_now(state)
        else:
            self._keeper.save(state)
        path = str(self._run / "checkpoints" / f"step-{state.step:08d}")
        self._report(event("checkpoint", step=state.step, path=path, seconds=time.perf_counter() - began))

    def _close(self, stopped: bool) -> Result:
        """Everything that is left to write, and the result, which every rank knows."""
        committed = self._parts.agreement.committed
        if not stopped:
            self._evaluate(committed)
        self._save()
        sent = sum(self._group.gather(self._group.meter.sent_bytes, "adding up the bytes sent"))
        prints = self._group.gather(fingerprint(self._prepared.module), "comparing final weights")
        if len(set(prints)) > 1:
            self._report(event("warning", message="the workers' weights differ in the last bits; exact mode keeps them equal"))
        own = digest(model_tensors(self._prepared.module)) if self._group.rank == 0 else ""
        code = self._group.gather(own, "sharing the digest")[0]
        if self._group.rank == 0:
            write_model(self._run / "model.safetensors", self._prepared.module.state_dict())
        result = Result(
            steps=committed,
            samples=self._parts.course.samples_before(committed + 1),
            loss=self._last.outcome.loss if self._last else None,
            metrics=self._metrics,
            digest=code,
            seconds=self._finished,
            step_ms=median_step_ms(self._step_seconds),
            start_ms=max(0.0, (self._begun - self._request.started) * 1000),
            bytes_sent=sent,
            plan=str(Plan.parse(self._request.plan)),
            workers=self._group.size,
            run=str(self._run),
        )
        self._report(event("stopped" if stopped else "end", **result.to_dict()))
        self._report.close()
        return result


def fingerprint(module: nn.Module) -> str:
    """A hash of a sample of every tensor's values: differs when weights were made differently, and is cheap."""
    code = hashlib.sha256()
    for name, tensor in model_tensors(module).items():
        flat = tensor.detach().flatten()
        stride = max(1, flat.numel() // 4096)
        code.update(name.encode())
        code.update(flat[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return code.hexdigest()


def model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by the user's names; tied ones under each of their names."""
    return {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}


def median_step_ms(seconds: list[float]) -> float | None:
    """The median time from commit to commit; the first ten are left out where there are more."""
    kept = seconds[10:] or seconds
    return statistics.median(kept) * 1000 if kept else None


def write_job(run: Path, request: Request, prepared: Prepared, hosts: list[dict[str, Any]]) -> None:
    """`job.json`: what ran, with what, so that it can be told apart and replayed."""
    job = prepared.job
    record = {
        "plan": str(prepared.plan),
        "workers": len(hosts),
        "exact": request.exact,
        "seed": job.seed,
        "batch": job.batch,
        "slices": job.slices,
        "steps": prepared.course.total,
        "samples_in_dataset": prepared.course.size,
        "source": request.source,
        "versions": hosts[0]["arithmetic"],
    }
    path = run / "job.json"
    try:
        path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise StorageFailed(str(path), error.strerror or str(error)) from error
