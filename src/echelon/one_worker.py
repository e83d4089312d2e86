"""What one worker does with what it was sent: train a job, or call the user's own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.assemble import prepare
from echelon.comm import Group, Meeting, join, leave
from echelon.errors import ConfigError, Diverged, EchelonError, UserError, users_code
from echelon.job import Job
from echelon.own import Run, StopAsked
from echelon.place import Place, check_process
from echelon.plan import Plan
from echelon.randomness import Generators, init_seed
from echelon.reporting import Line
from echelon.request import Request
from echelon.session import Session


def run_one(
    request: Request, place: Place, meeting: Callable[[], Meeting], load: Callable[[], Any], line: Line
) -> dict[str, Any]:
    """Train to the end (or to a stop). Returns `{"result": ..., "stopped": ...}`, the same on every rank."""
    torch.set_num_threads(place.threads(request.one_thread))
    device = place.device()
    try:
        what = load()
        if request.one_thread:  # whatever the job's file has set
            torch.set_num_threads(1)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.use_deterministic_algorithms(request.exact)
        if isinstance(what, Job):
            return _train_job(what, request, place, meeting, line, device)
        if callable(what):
            return _call_main(what, request, place, meeting, line, device)
        raise ConfigError("job", f"is {type(what).__name__} and must be an echelon.Job")
    except EchelonError as error:
        raise _completed(error, place.rank, request.out) from error
    finally:
        leave()


def _train_job(
    job: Job, request: Request, place: Place, meeting: Callable[[], Meeting], line: Line, device: torch.device
) -> dict[str, Any]:
    if request.steps is not None:
        fields = {name: getattr(job, name) for name in job.__dataclass_fields__}
        job = Job(**{**fields, "steps": request.steps, "epochs": None})
    plan = Plan.parse(request.plan)
    prepared = prepare(job, plan, workers=place.workers, device=device, exact=request.exact, merge=request.merge)
    line.meet()
    session = Session(request, prepared, _join(request, place, meeting, device), line)
    try:
        stopped = session.train()
        return {"result": session.finish(stopped=stopped).to_dict(), "stopped": stopped}
    finally:
        session.close()


def _join(request: Request, place: Place, meeting: Callable[[], Meeting], device: torch.device) -> Group:
    check_process()  # what makes the model and the data has run since the job was loaded
    topology = Plan.parse(request.plan).topology
    return join(meeting(), device, place.backend(request.backend, device), topology)


def _call_main(
    main: Callable[[Run], Any],
    request: Request,
    place: Place,
    meeting: Callable[[], Meeting],
    line: Line,
    device: torch.device,
) -> dict[str, Any]:
    line.meet()
    group = _join(request, place, meeting, device)
    run = Run(
        rank=place.rank,
        workers=place.workers,
        device=device,
        plan=Plan.parse(request.plan),
        exact=request.exact,
        merge=request.merge,
        steps=request.steps,
        session=lambda prepared: Session(request, prepared, group, line),
    )
    stopped = False
    Generators.of().set(init_seed(request.seed))
    try:
        try:
            with users_code("running main", place.rank):
                main(run)
            run.check_ended()
        except StopAsked:
            stopped = True
        if run.session is None:
            return {"result": None, "stopped": False}
        return {"result": run.session.finish(stopped=stopped).to_dict(), "stopped": stopped}
    finally:
        if run.session is not None:
            run.session.close()


def _completed(error: EchelonError, rank: int, run: str) -> EchelonError:
    """The error with what only this level knows: the rank, and the run folder that can be looked at."""
    if isinstance(error, Diverged):
        return Diverged(error.step, error.why.replace("echelon replay RUN", f"echelon replay {run}"), error.rank)
    if isinstance(error, UserError) and error.rank < 0:
        return UserError(rank, error.why, error.trace)
    return error
