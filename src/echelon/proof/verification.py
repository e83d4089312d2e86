"""Prove a plan on the user's own job: one plain process, then the plan, then every step of both compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.api import Show, Workers, count_workers, find_source, make_request
from echelon.errors import ConfigError, Stopped
from echelon.events import Event
from echelon.fleet import Start, launch
from echelon.job import Job
from echelon.known import Known
from echelon.plan import Plan
from echelon.plan.available import resolve_available
from echelon.proof.report import Report
from echelon.request import BACKENDS, Request, Source
from echelon.result import Result

SHOWN = ("step", "warning", "waiting", "stopping", "reference")


def verify(
    job: Job,
    plan: Plan | str = "dp",
    workers: Workers = 2,
    steps: int | None = None,
    exact: bool = False,
    show: Show | None = None,
    *,
    backend: str = BACKENDS[0],
) -> Report:
    """Whether `plan` on `workers` computes what one plain process computes (see tolerance.py for what that means).

    `steps` None: 4, or one more than an epoch where an epoch's end is within 12 steps. Nothing is left on disk.
    """
    if not isinstance(job, Job):
        raise ConfigError("job", f"must be an echelon.Job; got {type(job).__name__}")
    from echelon.worker import workers_around_us

    if workers_around_us() is not None:
        raise ConfigError("verify", "starts workers of its own; run it without torchrun")
    request = make_request(plan, find_source(job), exact=exact, steps=steps, out=None, resume=False, backend=backend)
    return _prove(request, job, workers, show)


def verify_file(
    target: str,
    *,
    plan: Plan | str = "dp",
    workers: Workers = 2,
    steps: int | None = None,
    exact: bool = False,
    backend: str = BACKENDS[0],
    show: Show | None = None,
    started: float | None = None,
) -> Report:
    """The same for the job that a file defines; this process does not import it."""
    source = Source.parse(target)
    request = make_request(
        plan, source, exact=exact, steps=steps, out=None, resume=False, started=started, backend=backend
    )
    return _prove(request, None, workers, show)


def _prove(asked: Request, job: Job | None, workers: Workers, show: Show | None) -> Report:
    count = count_workers(workers)
    known = Known(plan=asked.plan, workers=count)
    watch = _only_news(show)
    with tempfile.TemporaryDirectory(prefix="echelon-verify-") as place, known.told():
        resolve_available(Plan.parse(asked.plan), count)
        folder = Path(place)
        values: dict[str, Any] = {
            "source": asked.source,
            "plan": asked.plan,
            "exact": asked.exact,
            "workers": count,
            "steps": asked.steps,
            "folder": str(folder),
        }
        said = launch(Start(entry=_entry("reference", asked, job), request=values), watch)[0]
        values |= {"steps": said["steps"], "free": said["free"]}
        request = replace(
            asked,
            steps=said["steps"],
            out=str(folder / "run"),
            record=str(folder / "plan"),
            merge=said["free"]["merge"],
        )
        result = _run_plan(request, job, count, known.listen(folder / "run" / "events.jsonl", watch))
        values["result"] = result.to_dict()
        launch(Start(entry=_entry("comparison", asked, job), request=values), watch)
        return Report.from_dict(json.loads((folder / "report.json").read_text()))


def _run_plan(request: Request, job: Job | None, workers: int, watch: Show) -> Result:
    """The plan itself, by the machinery that trains, told to write down what it does. No run folder is kept of it."""
    Path(request.out).mkdir()
    start = Start(entry=_entry("plan", request, job), request=request.to_dict(), workers=workers)
    said = launch(start, watch)[0]
    result = Result(**{**said["result"], "run": ""})
    if said["stopped"]:
        stopped = Stopped(step=result.steps, run="")
        stopped.known = result.to_dict()
        raise stopped
    return result


def _entry(what: str, request: Request, job: Job | None) -> Any:
    """The worker function: by name for a job in a file, else a function that a fork of this process brings along."""
    if job is None or request.source is not None:
        names = {"plan": "worker:run_worker", "reference": "proof.child:run_reference"}
        return f"echelon.{names.get(what, 'proof.child:run_comparison')}"
    if what == "plan":
        from echelon.worker import run_with

        return run_with(job)
    return _later(what, job)


def _later(what: str, job: Job) -> Callable[[Any], int]:
    """Imported in the fork: the caller's process need not load torch for it."""

    def run(start: Any) -> int:
        from echelon.proof import child

        return child.reference_of(job)(start) if what == "reference" else child.comparison_of(job)(start)

    return run


def _only_news(show: Show | None) -> Show:
    """What is of interest while a proof is under way; not the end of a run that is only a part of it."""

    def tell(record: Event) -> None:
        if show is not None and record.get("event") in SHOWN:
            show(record)

    return tell
