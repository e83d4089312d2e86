"""Typed errors: each knows its exit code, carries its fields across a process boundary and says what to do next."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

_PACKAGE = str(Path(__file__).parent)
LINE_LIMIT, TRACE_LIMIT = 300, 64 << 10  # characters of a message in one line, and of a traceback
TRACE_BEGINS = "Traceback (most recent call last):"  # left out by Python where no frame is left


class EchelonError(Exception):
    """Base of everything Echelon raises on purpose. `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1
    shared: ClassVar[bool] = False
    """Whether every worker comes to it alike, so that one may speak for all."""
    known: dict[str, Any]
    """Fields of the `Result` that the run did not come to, filled in where it was started (see known.py)."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.known = {}
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(self.describe())

    def describe(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.fields.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return decode, (encode(self),)


class ConfigError(EchelonError):
    """A job, a plan or an option that cannot work. `term` is the word at fault."""

    exit_code = 2
    shared = True
    term: str
    why: str

    def __init__(self, term: str, why: str) -> None:
        super().__init__(term=term, why=why)

    def describe(self) -> str:
        return f"{self.term}: {self.why}"


class OutOfMemory(ConfigError):
    """Memory ran out on one worker: what was asked for does not fit."""

    shared = False


class OutOfMemoryPlan(EchelonError):
    """A plan that would need more memory than there is."""

    exit_code = 2
    needed: int
    available: int

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed=needed, available=available)

    def describe(self) -> str:
        return f"the plan needs {self.needed / 2**30:.2f} GiB per worker and {self.available / 2**30:.2f} GiB are there"


class UserError(EchelonError):
    """The user's code failed on `rank` (-1: in a process that is no worker, or it is filled in later); `trace` is its
    traceback, shown once and before anything else.
    """

    exit_code = 3
    rank: int
    why: str
    trace: str

    def __init__(self, rank: int, why: str, trace: str = "") -> None:
        super().__init__(rank=rank, why=why, trace=trace)

    def describe(self) -> str:
        return f"{f'rank {self.rank}' if self.rank >= 0 else 'in one process'}: {self.why}"


class Diverged(EchelonError):
    """The loss or a gradient stopped being a number; nothing of that step was applied. Rank -1: in one process."""

    exit_code = 3
    shared = True
    step: int
    why: str
    rank: int

    def __init__(self, step: int, why: str, rank: int = 0) -> None:
        super().__init__(step=step, why=why, rank=rank)

    def describe(self) -> str:
        where = f", rank {self.rank}" if self.rank >= 0 else ""
        return f"step {self.step}{where}: {self.why}"


class VerificationFailed(EchelonError):
    """A plan that does not compute what one process computes."""

    exit_code = 4
    why: str

    def __init__(self, why: str) -> None:
        super().__init__(why=why)

    def describe(self) -> str:
        return self.why


class Stopped(EchelonError, SystemExit):
    """Training was asked to stop and can be resumed after `step`, unless `run` is empty: then nothing was kept.
    `unsaved` steps that came later, at least, were lost with workers that had to be ended. Uncaught, it ends a script
    quietly with exit code 75.
    """

    exit_code = 75
    shared = True
    step: int
    run: str
    unsaved: int

    def __init__(self, step: int, run: str, unsaved: int = 0) -> None:
        super().__init__(step=step, run=run, unsaved=unsaved)
        self.code = self.exit_code

    def describe(self) -> str:
        if not self.step and not self.unsaved:
            return "stopped on request before the first step; nothing was trained"
        if not self.step:
            return f"stopped on request at step {self.unsaved}; nothing was saved yet, so start it again"
        if not self.run:
            return f"stopped on request after step {self.step + self.unsaved}; nothing was kept, so start it again"
        way_on = f"go on with --resume --out {shlex.quote(self.run)}"
        if not self.unsaved:
            return f"stopped on request after step {self.step}; {way_on}"
        later = "1 later step" if self.unsaved == 1 else f"at least {self.unsaved} later steps"
        return f"stopped on request after step {self.step} (saved); {later} will be computed again: {way_on}"


class TooFewWorkers(EchelonError):
    """Workers were lost and too few are left to go on."""

    exit_code = 76
    why: str

    def __init__(self, why: str) -> None:
        super().__init__(why=why)

    def describe(self) -> str:
        return self.why


class PeerLost(EchelonError):
    """Another worker died or fell silent. A symptom: whoever collects errors prefers any other cause."""

    exit_code = 76
    rank: int
    during: str

    def __init__(self, rank: int, during: str) -> None:
        super().__init__(rank=rank, during=during)

    def describe(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a worker"
        return f"{who} was lost during {self.during}"


class Timeout(EchelonError):
    """A wait ran into its bound."""

    exit_code = 76
    op: str
    seconds: float

    def __init__(self, op: str, seconds: float) -> None:
        super().__init__(op=op, seconds=seconds)

    def describe(self) -> str:
        return f"{self.op} did not finish within {self.seconds:g} s"


class OutOfStep(EchelonError):
    """Workers are in different operations at the same point, and none of them would ever end."""

    exit_code = 3
    rank: int
    during: str
    other: int
    other_during: str

    def __init__(self, rank: int, during: str, other: int, other_during: str) -> None:
        super().__init__(rank=rank, during=during, other=other, other_during=other_during)

    def describe(self) -> str:
        return (
            f"rank {self.rank} is in {self.during} and rank {self.other} in {self.other_during}: "
            "every worker must take the same steps; does a loop, or a condition, end earlier on one of them?"
        )


class StorageFailed(EchelonError):
    """The run folder or a checkpoint could not be written or read."""

    exit_code = 77
    path: str
    why: str

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path=path, why=why)

    def describe(self) -> str:
        return f"{self.path}: {self.why}"


class CheckpointCorrupt(EchelonError):
    """Saved state that is not what was written; it is never loaded."""

    exit_code = 78
    path: str
    why: str

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path=path, why=why)

    def describe(self) -> str:
        return f"{self.path}: {self.why}; it was not loaded"


class Bug(EchelonError):
    """A fault of Echelon itself, with its traceback."""

    exit_code = 1
    rank: int
    why: str
    trace: str

    def __init__(self, rank: int, why: str, trace: str = "") -> None:
        super().__init__(rank=rank, why=why, trace=trace)

    def describe(self) -> str:
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        return f"{who}{self.why} (a bug in Echelon; please report it with the traceback above)"


def encode(error: EchelonError) -> dict[str, Any]:
    """The error as JSON-able values."""
    return {"type": type(error).__name__, **error.fields}


def decode(values: dict[str, Any]) -> EchelonError:
    """The error that `encode` wrote, of the same type and with the same fields."""
    fields = dict(values)
    name = fields.pop("type")
    kind = {cls.__name__: cls for cls in _all_errors(EchelonError)}[name]
    return kind(**fields)


def _all_errors(root: type[EchelonError]) -> list[type[EchelonError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_errors(child))]


@contextmanager
def users_code(doing: str, rank: int = -1) -> Iterator[None]:
    """Whatever the user's code raises inside becomes a `UserError` with its traceback; rank -1 is filled in by the
    worker.
    """
    try:
        yield
    except (EchelonError, Unwinding):
        raise
    except SystemExit as error:
        status = shorten(repr(error.code), LINE_LIMIT)
        raise UserError(rank, f"sys.exit({status}) was called while {doing}", user_trace(error)) from error
    except BaseException as error:
        if _is_out_of_memory(error):
            why = f"rank {rank} ran out of memory while {doing}" if rank >= 0 else f"memory ran out while {doing}"
            raise OutOfMemory(
                "memory", f"{why}; use more workers, a smaller batch, or microbatch= in the job ({headline(error)})"
            ) from error
        raise UserError(rank, f"{headline(error)} (while {doing})", user_trace(error)) from error


class Unwinding(BaseException):
    """Ours, on its way through the user's code; not an Exception, so that no `except` of theirs eats it."""


def user_trace(error: BaseException) -> str:
    """The traceback without Echelon's own frames, where any other is left: what the user can mend comes first."""
    told = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in told.stack if not frame.filename.startswith((_PACKAGE, "<frozen importlib"))]
    if theirs or isinstance(error, SyntaxError):
        told.stack = traceback.StackSummary.from_list(theirs)
    text = shorten("".join(told.format()), TRACE_LIMIT)
    return text if TRACE_BEGINS in text else f"{TRACE_BEGINS}\n{text}"


def headline(error: BaseException) -> str:
    """The error in one line; also of one that cannot say what it is."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001  its `__str__` is the user's code
        lines = []
    said = shorten(lines[0], LINE_LIMIT) if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def shorten(text: str, limit: int) -> str:
    """At most about `limit` characters: how the text begins and ends. A printed tensor may have millions."""
    if len(text) <= limit:
        return text
    head = limit // 4 if "\n" in text else limit * 3 // 4
    return f"{text[:head]} [... {len(text) - limit} characters left out ...] {text[head - limit :]}"


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in headline(error)
    )
