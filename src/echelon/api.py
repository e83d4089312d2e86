"""From the caller's process to a result: where the job is, who starts the workers, what comes back."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from operator import index
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from echelon.errors import Bug, ConfigError, Stopped, UserError
from echelon.events import Event
from echelon.fleet import PRELOAD, Start
from echelon.fleet import launch as run_workers
from echelon.fleet.streams import open_missing
from echelon.job import Job
from echelon.known import Known
from echelon.plan import Plan
from echelon.plan.available import resolve_available
from echelon.plan.parts import listed
from echelon.progress import progress
from echelon.request import BACKENDS, Request, Script, Source
from echelon.result import Result
from echelon.runs import claim

if TYPE_CHECKING:
    from echelon.own import Run

Show = Callable[[Event], None]
Workers = int | str | tuple[int, int] | None


def train(
    job: Job,
    plan: Plan | str = "dp",
    workers: Workers = None,
    *,
    exact: bool = False,
    out: str | Path | None = None,
    steps: int | None = None,
    resume: bool = False,
    port: int | None = None,
    backend: str = BACKENDS[0],
    show: Show | None = None,
) -> Result:
    """Train `job` by `plan` on `workers` local processes, or as one of torchrun's workers when started by it.

    Raises a typed error (see errors.py) when something is wrong; `Stopped` when asked to stop, after saving. `backend`
    is what carries the bytes: our own, or gloo.
    """
    if not isinstance(job, Job):
        raise ConfigError("job", f"must be an echelon.Job; got {type(job).__name__}")
    source = find_source(job)
    request = make_request(plan, source, exact=exact, steps=steps, out=out, resume=resume, backend=backend)
    result = _join_or_start(request, job, workers, port, show)
    assert result is not None, "a job always has a result"
    return result


def launch(
    main: Callable[[Run], Any],
    workers: Workers = None,
    plan: Plan | str = "dp",
    *,
    exact: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    port: int | None = None,
    backend: str = BACKENDS[0],
    show: Show | None = None,
) -> Result | None:
    """Call `main(run)` on every worker: a training loop of one's own (see own.py). None if it never called
    `run.prepare`.

    `seed` is the random state that `main` starts with, the same on every worker.
    """
    if not callable(main):
        raise ConfigError("main", f"must be a function of one argument, main(run); got {type(main).__name__}")
    plan = Plan.of(plan)
    if plan.pp > 1:
        raise ConfigError(
            f"pp{plan.pp}", "a loop of one's own cannot be cut into stages; describe it as an echelon.Job"
        )
    source = find_source(main)
    request = make_request(plan, source, exact=exact, steps=None, out=out, resume=resume, backend=backend)
    request = replace(request, seed=seed)
    return _join_or_start(request, main, workers, port, show)


def train_file(
    target: str,
    *,
    plan: Plan | str = "dp",
    workers: Workers = None,
    exact: bool = False,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    port: int | None = None,
    backend: str = BACKENDS[0],
    show: Show | None = None,
    started: float | None = None,
) -> Result | None:
    """Train the job that a file defines. This process does not import it, the workers do; unless torchrun has started
    it as a worker. The result is rank 0's; None on other ranks, and for a loop of one's own that prepared nothing.
    """
    from echelon.worker import be_inside, rank_around_us, workers_around_us

    source = Source.parse(target)
    request = make_request(
        plan, source, exact=exact, steps=steps, out=out, resume=resume, started=started, backend=backend
    )
    around = workers_around_us()
    if around is None:
        return start(request, None, workers, port, show)
    _check_workers(workers, around)
    be_inside()
    result = _join(request, source.load(rank_around_us()), around, workers)
    return result if rank_around_us() == 0 else None


def _join_or_start(request: Request, what: Any, workers: Workers, port: int | None, show: Show | None) -> Result | None:
    from echelon.worker import workers_around_us

    around = workers_around_us()
    if around is not None:
        return _join(request, what, around, workers)
    return start(request, what, workers, port, show)


def start(request: Request, what: Any, workers: Workers, port: int | None, show: Show | None) -> Result | None:
    """Start local workers and wait for what they come to. `what` (job or main) is for a request without a source."""
    open_missing()
    count = count_workers(workers)
    known = Known(plan=request.plan, workers=count)
    with known.told():
        _check(request, what, count)
        with (
            claim(request.out, request.name, resume=request.resume, base=request.base) as run,
            _watching(show) as watch,
        ):
            known.run = run
            request = replace(request, out=str(run))
            results = run_workers(
                Start(
                    entry="echelon.worker:run_worker" if request.source else _forked(what),
                    request=request.to_dict(),
                    workers=count,
                    port=port if port is not None else _port_wanted(),
                    run=request.out,
                    preload=(*PRELOAD, "echelon.worker", "echelon.one_worker"),
                ),
                known.listen(request.folder / "events.jsonl", watch),
            )
        return to_result(results[0])


def _check(request: Request, what: Any, workers: int) -> None:
    plan = Plan.parse(request.plan)
    resolve_available(plan, workers)
    if isinstance(what, Job):
        from echelon.assemble import check_plan

        check_plan(what, plan, workers, request.exact)


@contextmanager
def _watching(show: Show | None) -> Iterator[Show]:
    """Whoever wants to know what happens, or the display; what the user's code raised is shown with its traceback."""
    screen = None if show else progress(sys.stdout)
    try:
        yield show or screen or (lambda _: None)
    except (UserError, Bug) as error:
        raise error from (WorkerTrace(error.trace) if error.trace else None)
    finally:
        if screen is not None:
            screen.close()


class WorkerTrace(Exception):
    """A traceback from a worker, which Python prints above the error it led to."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


def _port_wanted() -> int | None:
    from echelon.worker import port_wanted

    return port_wanted()


def _forked(what: Any) -> Any:
    from echelon.worker import run_with

    for name in PRELOAD:  # once here instead of in every fork
        import_module(name)
    return run_with(what)


def _join(request: Request, what: Any, around: int, workers: Workers) -> Result | None:
    from echelon.worker import rank_around_us, run_joined

    _check_workers(workers, around)
    known = Known(plan=request.plan, workers=around)
    with known.told():
        resolve_available(Plan.parse(request.plan), around)
        if rank_around_us() != 0:
            return to_result(run_joined(replace(request, out=""), what))
        with claim(request.out, request.name, resume=request.resume, base=request.base) as run:
            known.run = run
            return to_result(run_joined(replace(request, out=str(run)), what))


def _check_workers(workers: Workers, around: int) -> None:
    if workers is not None and count_workers(workers) != around:
        raise ConfigError("workers", f"is {workers} and WORLD_SIZE is {around}; leave it out, or make them equal")


def to_result(payload: dict[str, Any]) -> Result | None:
    if payload["result"] is None:
        return None
    result = Result(**payload["result"])
    if payload["stopped"]:
        stopped = Stopped(result.steps, result.run)
        stopped.known = result.to_dict()
        raise stopped
    return result


def count_workers(workers: Workers) -> int:
    """`N`, `(MIN, N)` or `"MIN:N"`; one worker if nothing is said."""
    try:
        if workers is None:
            return 1
        if isinstance(workers, str):
            low, colon, high = workers.partition(":")
            bounds = (int(low), int(high)) if colon else (1, int(low))
        elif isinstance(workers, tuple):
            least, most = workers
            bounds = (index(least), index(most))
        else:
            bounds = (1, index(workers))
    except (TypeError, ValueError) as error:
        raise ConfigError("workers", f"must be a number, or MIN:N; got {workers!r}") from error
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError("workers", f"must be at least 1, and MIN at most N; got {workers!r}")
    return bounds[1]


def find_source(what: object) -> Source | None:
    """The file and module-level name by which a worker can import this very object again; None means: fork the
    caller.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if main is None or file is None or not Path(file).is_file() or getattr(main, "__spec__", None) is not None:
        return None
    held = [name for name, value in vars(main).items() if value is what]
    if not held:
        return None
    script = Script.read(Path(file).read_bytes())
    line = _line_of(main)
    if line is not None and not any(line in lines for lines in script.guarded):
        return None  # an import would come by here again, and start workers of its own
    return next((Source(file=str(Path(file).resolve()), name=name) for name in held if name in script.names), None)


def _line_of(module: ModuleType) -> int | None:
    """Which line of the module itself is being executed now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_globals is vars(module) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    return frame.f_lineno if frame is not None else None


def name_of(source: Source | None) -> str:
    """What a run folder is called by: the file, and the job's name where it is not just `job`."""
    if source is None:
        return "job"
    stem = Path(source.file).stem
    return re.sub(r"[^\w.-]", "-", stem if source.name in (None, "job", "main") else f"{stem}-{source.name}")


def make_request(
    plan: Plan | str,
    source: Source | None,
    *,
    exact: bool,
    steps: int | None,
    out: str | Path | None,
    resume: bool,
    started: float | None = None,
    backend: str = BACKENDS[0],
) -> Request:
    """Parse the plan, check the options: the values that every worker is given."""
    if steps is not None and (isinstance(steps, bool) or steps < 1):
        raise ConfigError("steps", f"must be a whole number, at least 1; got {steps!r}")
    plan = Plan.of(plan)
    if backend not in BACKENDS:
        raise ConfigError("backend", f"there are {listed(BACKENDS)}; got {backend!r}")
    if plan.topology and backend != BACKENDS[0]:
        raise ConfigError(plan.topology, f"is how {BACKENDS[0]} sends; leave one of the two out: it, or {backend}")
    return Request(
        plan=str(plan),
        backend=backend,
        exact=exact,
        steps=steps,
        out=str(out) if out is not None else "",
        base=_here(),
        name=name_of(source),
        resume=resume,
        started=started or time.time(),
        source={"file": source.file, "name": source.name} if source else None,
    )


def _here() -> str:
    """The folder that paths are seen from. Empty if it has been deleted: an absolute path may still lead somewhere."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""
