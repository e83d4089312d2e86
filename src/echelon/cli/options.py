"""The words of the command line and the help that teaches them."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any, NoReturn

from echelon.errors import ConfigError
from echelon.request import BACKENDS

DESCRIPTION = """\
Train PyTorch models on many workers, and prove that the result is what one process would have computed."""

EPILOG = """\
a first minute:
  echelon doctor                                            is this machine ready?
  echelon train job.py --workers 4                          train `job` of job.py on 4 workers
  echelon verify job.py --plan dp --workers 4 --exact       prove that plan on your own model
  echelon bench links --workers 4                           how fast do workers talk to each other?
  echelon COMMAND --help                                    more examples

job.py needs one module-level name:
  job = echelon.Job(model=..., loss=..., data=..., optimizer=..., batch=256, steps=1000)

exit codes: 0 done, 2 wrong use, 3 your code failed, 4 a difference was found, 75 stopped and resumable,
            76 too few workers left, 77 storage failed, 78 corrupted state refused, 1 a bug of ours
"""

TRAIN_EPILOG = """\
examples:
  echelon train job.py                                      one worker, the job as written
  echelon train job.py --workers 4 --steps 100              four workers, at most 100 steps
  echelon train job.py:small --workers 2                    the job called `small` in that file
  echelon train job.py --workers 4 --exact                  the same bits as with any other number of workers
  echelon train job.py --workers 4 --plan dp+tree           gradients summed along a tree
  echelon train job.py --out runs/a                         then stop it with Ctrl-C, and go on, on fewer workers:
  echelon train job.py --out runs/a --resume --workers 2
  echelon train job.py --json 2>/dev/null | tail -n 1       the result as one JSON object
"""

VERIFY_EPILOG = """\
examples:
  echelon verify job.py --workers 4                         equal within the rounding that the arithmetic allows?
  echelon verify job.py --workers 3 --exact                 equal to the bit? (exit code 4 if not)
  echelon verify job.py --plan dp --workers 4 --steps 20

The job runs twice: once in one plain process, once under the plan, on 2 workers unless --workers says otherwise.
Losses, gradient norms and every parameter are compared after every step; the first step and parameter that differ are
named.
"""

REPLAY_EPILOG = """\
examples:
  echelon replay runs/digits-20250101-120000 --step 120 --slice 3

Shows the loss, the gradient norms and a summary of the inputs of that slice: where a NaN came from, what a bad batch
held.
"""

DOCTOR_EPILOG = """\
examples:
  echelon doctor                                            what is there, what is missing and how to get it
  echelon doctor --out /data/runs                           measure that disk instead of runs/
  echelon doctor --json                                     the same for a program

exit code 0 if training can run on this machine, 2 if something it needs is missing.
"""

BENCH_EPILOG = """\
examples:
  echelon bench links                                       latency and bandwidth between 2 ranks of this machine
"""

LINKS_EPILOG = """\
examples:
  echelon bench links                                       2 ranks of this machine
  echelon bench links --workers 4 --sizes 4k,1m,25m         the links of 4, and all-reduces of these sizes
  echelon bench links --json 2>/dev/null | tail -n 1        the same for a program
  torchrun --nnodes 2 --nproc-per-node 2 ... --no-python echelon bench links       over a network: as these ranks

Row a, column b of a matrix is what rank a sends to rank b: the transport (shm: shared memory, tcp: sockets), the
microseconds that an empty message takes, and GB/s. Then all-reduce by topology: what the moves of the topology and
the measured links predict, beside what was counted and timed. Bytes and messages agree exactly; a time is predicted
well if its ratio is near 1.
"""


PLANS = "dp, dp+ring, dp+tree, dp+star, dp+hier"


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are ConfigErrors, so that they end like every other one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        term, colon, why = message.partition(": ")
        if not (colon and term.startswith("argument ")):
            term, why = self.prog.removeprefix("echelon "), message
        term = term.removeprefix("argument ")
        raise ConfigError(term, f"{why} (see `{self.prog} --help`)")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="echelon", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"echelon {_version()}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    train = verbs.add_parser("train", help="train a job", description="Train the job of a file.", epilog=TRAIN_EPILOG)
    _add_job(train, workers=None)
    train.add_argument("--out", metavar="DIR", help="run folder (default: runs/NAME-DATE-TIME)")
    train.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one"
    )
    train.add_argument("--port", type=_port, metavar="N", help="port on 127.0.0.1 to meet at (default: any free one)")
    _finish(train, "train")

    verify = verbs.add_parser(
        "verify",
        help="prove that a plan computes what one process computes",
        description="Run the job in one plain process and under the plan, and compare.",
        epilog=VERIFY_EPILOG,
    )
    _add_job(verify, workers=2)
    _finish(verify, "verify")

    replay = verbs.add_parser(
        "replay",
        help="compute one slice of a run again",
        description="Compute one slice of a finished or broken run again, here, alone.",
        epilog=REPLAY_EPILOG,
    )
    replay.add_argument("run", metavar="RUN", help="run folder")
    replay.add_argument("--step", type=_positive, required=True, metavar="T", help="which step, counted from 1")
    replay.add_argument("--slice", type=_natural, required=True, metavar="S", help="which slice of it, counted from 0")
    _finish(replay, "replay")

    doctor = verbs.add_parser(
        "doctor",
        help="what this machine has and what it lacks",
        description="Versions, cores, memory, links, disk, ports; what is missing and how to get it.",
        epilog=DOCTOR_EPILOG,
    )
    doctor.add_argument("--out", default="runs", metavar="DIR", help="folder whose disk to measure (default: runs)")
    _finish(doctor, "doctor")
    _add_bench(verbs)
    return parser


def _add_bench(verbs: Any) -> None:
    bench = verbs.add_parser(
        "bench",
        help="measure what training will meet: links",
        description="Measure what training will meet.",
        epilog=BENCH_EPILOG,
    )
    subjects = bench.add_subparsers(title="subjects", metavar="SUBJECT", required=True, parser_class=_Parser)
    links = subjects.add_parser(
        "links",
        help="latency and bandwidth between ranks, all-reduce by topology",
        description="Measure the links between ranks, and predict and time all-reduce over them.",
        epilog=LINKS_EPILOG,
    )
    links.add_argument("--workers", type=_positive, metavar="N", help="number of ranks (default: 2, or torchrun's)")
    links.add_argument(
        "--sizes", type=_sizes, default="4k,1m,25m", metavar="S,S", help="of the all-reduces (default: 4k,1m,25m)"
    )
    _finish(links, "bench")


def _add_job(parser: argparse.ArgumentParser, *, workers: int | None) -> None:
    """`workers` if nothing is said; None: as many as torchrun has started, or 1."""
    parser.add_argument("target", metavar="FILE[:job]", help="Python file, and the job's name in it (default: job)")
    parser.add_argument("--plan", default="dp", metavar="P", help=f"how to train: {PLANS} (default: dp)")
    parser.add_argument(
        "--workers", type=_workers, default=workers, metavar="N", help=f"number of workers (default: {workers or 1})"
    )
    parser.add_argument("--exact", action="store_true", help="the same bits on any number of workers")
    parser.add_argument("--steps", type=_positive, metavar="S", help="steps, in place of what the job says")
    parser.add_argument(
        "--backend", choices=BACKENDS, default=BACKENDS[0], help=f"what carries the bytes (default: {BACKENDS[0]})"
    )


def _finish(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    parser.set_defaults(verb=verb)


def _workers(text: str) -> int | str:
    """`4`, or `2:4` as it is: down to 2 of 4."""
    least, colon, most = text.partition(":")
    if not colon:
        return _positive(text)
    if _positive(least) > _positive(most):
        raise argparse.ArgumentTypeError(f"{text} asks for at least {least} of {most} workers; write MIN:N")
    return f"{int(least)}:{int(most)}"


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    from echelon.bench import parse_size

    return tuple(parse_size(size) for size in text.split(","))


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _port(text: str) -> int:
    number = _positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; they end at 65535")
    return number


def _version() -> str:
    try:
        return importlib.metadata.version("echelon")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
