"""What a command says: results and findings on standard output, one line about a failure on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from typing import Any

from echelon.errors import EchelonError, Stopped, encode


def report(error: EchelonError, *, as_json: bool, values: dict[str, Any] | None = None) -> int:
    """Says what went wrong: the traceback if there is one, one line, and with --json an object."""
    trace = getattr(error, "trace", "")
    label = "" if isinstance(error, Stopped) else "error: "
    with contextlib.suppress(OSError):
        if trace:
            sys.stderr.write(trace.rstrip("\n") + "\n")
        sys.stderr.write(f"echelon: {label}{one_line(error)}\n")
        sys.stderr.flush()
    if as_json:
        with contextlib.suppress(OSError):
            write_json({**(values or {}), "error": {**encode(error), "message": str(error)}})
    return error.exit_code


def one_line(value: object) -> str:
    return " ".join(str(value).split())


def write_text(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def write_json(values: dict[str, Any]) -> None:
    # A worker's output may have ended in the middle of a line, and this must be a line of its own.
    sys.stdout.write("\n" + json.dumps(_to_json(values), allow_nan=False, default=str) + "\n")
    sys.stdout.flush()


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
