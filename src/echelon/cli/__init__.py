"""The `echelon` command: words in, an exit code out. What it does is done by `api`, `proof`, `doctor` and `bench`.

Nothing heavy is imported before a verb needs it: `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon.cli.options import build_parser
from echelon.cli.report import flush, report, unknown, write_json, write_text
from echelon.errors import Bug, ConfigError, EchelonError, Stopped, VerificationFailed
from echelon.fleet.streams import open_missing

LATER = (
    "chaos",
    "serve",
    "cost",
    "skew",
    "checkpoints",
    "plan",
    "simulate",
    "watch",
    "explain",
    "submit",
    "jobs",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    open_missing()
    started = time.time() if argv is not None else _process_start()
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    nothing = unknown(proof=words[:1] == ["verify"]) if words[:1] != ["bench"] else {}
    try:
        code = _run(words, started)
    except KeyboardInterrupt:
        code = report(Stopped(step=0, run=""), as_json=as_json, values=nothing)
    except EchelonError as error:
        code = report(error, as_json=as_json, values=nothing)
    except BrokenPipeError:
        code = 1  # whoever read our output is gone, so there is nobody to tell
    except Exception as error:  # noqa: BLE001  the last place that can say what happened
        why = f"{type(error).__name__}: {error}"
        bug = Bug(rank=-1, why=why, trace=traceback.format_exc())
        code = report(bug, as_json=as_json, values=nothing)
    flush()
    return code


def _run(words: list[str], started: float) -> int:
    if words and words[0] in LATER:
        raise ConfigError(words[0], "not available yet; `echelon --help` lists what is")
    parser = build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return ConfigError.exit_code
    options = parser.parse_args(words, argparse.Namespace(started=started))
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "train": _train,
        "verify": _verify,
        "replay": _replay,
        "doctor": _doctor,
        "bench": _bench,
    }
    return verbs[options.verb](options)


def _train(options: argparse.Namespace) -> int:
    from echelon.api import train_file
    from echelon.progress import progress
    from echelon.worker import rank_around_us

    with contextlib.closing(progress(sys.stderr if options.json else sys.stdout)) as show:
        result = train_file(
            options.target,
            plan=options.plan,
            workers=options.workers,
            exact=options.exact,
            steps=options.steps,
            out=options.out,
            resume=options.resume,
            port=options.port,
            backend=options.backend,
            show=show,
            started=options.started,
        )
    if options.json and result is not None:
        write_json(result.to_dict())
    elif options.json and rank_around_us() == 0:  # under another launcher, rank 0 prints for all
        write_json(unknown())  # a loop of one's own that prepared nothing
    return 0


def _verify(options: argparse.Namespace) -> int:
    from echelon.progress import progress
    from echelon.proof import verify_file

    with contextlib.closing(progress(sys.stderr if options.json else sys.stdout)) as show:
        proof = verify_file(
            options.target,
            plan=options.plan,
            workers=options.workers,
            steps=options.steps,
            exact=options.exact,
            backend=options.backend,
            show=show,
            started=options.started,
        )
    if not options.json:
        write_text(proof.text())
    if not proof.equal:
        why = f"the plan does not compute what one process computes; they differ first in {proof.difference()}"
        return report(VerificationFailed(why), as_json=options.json, values=proof.to_dict())
    if options.json:
        write_json(proof.to_dict())
    return 0


def _replay(options: argparse.Namespace) -> int:
    from echelon.proof import replay

    slice_report = replay(options.run, options.step, options.slice)
    if options.json:
        write_json(slice_report.to_dict())
    else:
        write_text(slice_report.text())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from echelon import doctor

    findings = []
    for finding in doctor.examine(options.out):
        findings.append(finding)
        if not options.json:
            write_text(doctor.line(finding))
    if options.json:
        write_json(doctor.to_dict(findings))
    else:
        write_text(doctor.verdict(findings))
    return 0 if doctor.can_train(findings) else ConfigError.exit_code


def _bench(options: argparse.Namespace) -> int:
    from echelon.bench import bench_links
    from echelon.progress import progress

    with contextlib.closing(progress(sys.stderr)) as show:
        found = bench_links(workers=options.workers, sizes=options.sizes, show=show)
    if found is not None and options.json:
        write_json(found.to_dict())
    elif found is not None:
        write_text(found.text())
    return 0


def _process_start() -> float:
    """When the command was started (Unix seconds), the interpreter included: `start_ms` counts from there."""
    now = time.time()
    try:
        # proc_pid_stat(5): field 22, in clock ticks since boot; the name in field 2 may hold spaces.
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
        )
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if age > 0 else now
