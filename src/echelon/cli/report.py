"""What a command says: results and findings on standard output, one line about a failure on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from typing import Any

from echelon.errors import EchelonError, Stopped, StorageFailed, encode
from echelon.progress.words import harmless
from echelon.result import FIELDS
from echelon.storage import reason

PROOF_FIELDS = ("equal", "max_abs_diff", "first_difference")


def report(error: EchelonError, *, as_json: bool, values: dict[str, Any]) -> int:
    """Says what went wrong: the traceback if there is one, one line, and with --json an object: `values`, what the
    error knows better, and the error.
    """
    trace = getattr(error, "trace", "")
    label = "" if isinstance(error, Stopped) else "error: "
    with contextlib.suppress(OSError):
        if trace:
            sys.stderr.write(trace.rstrip("\n") + "\n")
        sys.stderr.write(f"echelon: {label}{one_line(error)}\n")
        sys.stderr.flush()
    if as_json:
        with contextlib.suppress(OSError, StorageFailed):
            write_json({**values, **error.known, "error": _speak_of(error)})
    return error.exit_code


def unknown(*, proof: bool = False) -> dict[str, Any]:
    """Every field of a result, and of a proof, with nothing in it."""
    return dict.fromkeys((*FIELDS, *PROOF_FIELDS) if proof else FIELDS)


def _speak_of(error: EchelonError) -> dict[str, Any]:
    """The error's fields; no rank is null, which is -1 among ourselves."""
    values = encode(error)
    if values.get("rank", 0) < 0:
        values["rank"] = None
    return {**values, "message": str(error)}


def one_line(value: object) -> str:
    return harmless(" ".join(str(value).split()))


def write_text(text: str) -> None:
    _put(text.rstrip("\n") + "\n")


def _put(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has enough
        raise
    except OSError as error:
        raise StorageFailed("standard output", f"cannot be written: {reason(error)}") from error


def write_json(values: dict[str, Any]) -> None:
    # A worker's output may have ended in the middle of a line, and this must be a line of its own.
    _put("\n" + json.dumps(_to_json(values), allow_nan=False, default=str) + "\n")


def _to_json(value: Any) -> Any:
    """The value with what JSON cannot say as text: `float("nan")` reads it back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value


def flush() -> None:
    """Leaves nothing for the interpreter to flush at its end, where a closed pipe would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
