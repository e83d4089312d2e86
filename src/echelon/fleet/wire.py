"""Messages between launcher and worker: one JSON object a line, of bounded size, over a stream socket."""

from __future__ import annotations

import json
from typing import Any

LINE_LIMIT_BYTES = 16 << 20


class Garbled(Exception):
    """What arrived is no message: too long, or not a JSON object."""


def to_line(message: dict[str, Any]) -> bytes:
    """The message as one line; a message that no receiver would take is refused here."""
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError(f"a message of {len(line)} bytes is longer than the {LINE_LIMIT_BYTES} that a line may have")
    return line


class Lines:
    """Cuts a stream of bytes into messages; holds at most one unfinished line."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes, in order."""
        self._rest += data
        lines: list[bytes] = []
        if b"\n" in data:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
        if max(len(self._rest), *map(len, lines), 0) >= LINE_LIMIT_BYTES:
            raise Garbled(f"a line longer than {LINE_LIMIT_BYTES} bytes")
        return [_parse(line) for line in lines]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"not JSON: {line[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise Garbled(f"no object with a kind: {line[:80]!r}")
    return message
