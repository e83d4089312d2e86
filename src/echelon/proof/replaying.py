"""Computes one slice of a run again, alone, from the newest sound checkpoint before the step or the first weights."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from echelon.api import Show
from echelon.errors import ConfigError
from echelon.fleet import Start, launch
from echelon.progress import progress
from echelon.proof.replay_report import ReplayReport


def replay(run: str | Path, step: int, slice: int, show: Show | None = None) -> ReplayReport:  # noqa: A002
    """Slice `slice` (from 0) of step `step` (from 1) of the run in the folder `run`, in a process of its own.

    Steps from the checkpoint on are recomputed in one process: the same bits if the run was exact.
    """
    facts = read_run(Path(run))
    if not 1 <= step <= facts["steps"]:
        raise ConfigError("step", f"{step} is none of this run's; it has 1 to {facts['steps']}")
    if not 0 <= slice < facts["slices"]:
        raise ConfigError("slice", f"{slice} is none of this run's; they are 0 to {facts['slices'] - 1}")
    with tempfile.TemporaryDirectory(prefix="echelon-replay-") as place:
        answer = Path(place) / "report.json"
        request = {"run": str(run), "facts": facts, "step": step, "slice": slice, "answer": str(answer)}
        start = Start(entry="echelon.proof.replay_child:run_replay", request=request)
        if show is not None:
            launch(start, show)
        else:
            with closing(progress(sys.stderr)) as own:
                launch(start, own)
        return ReplayReport.from_dict(json.loads(answer.read_text()))


def read_run(run: Path) -> dict[str, Any]:
    """What `job.json` says of the run."""
    path = run / "job.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("run", f"{run} is no run folder: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError("run", f"{path} is no JSON: {error}") from error
    if not facts.get("source"):
        why = "its job was not in a file (a closure, a notebook or a test), so it cannot be made again"
        raise ConfigError("run", f"{run}: {why}; put the job into a file, at module level, and train that")
    if not Path(facts["source"]["file"]).is_file():
        raise ConfigError("run", f"{facts['source']['file']}, which defines the job of {run}, is not there any more")
    return facts
