"""The manifest says what a checkpoint consists of; nothing is loaded that it does not vouch for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.checkpoint.disk import HashedInput, reading
from echelon.errors import CheckpointCorrupt, ConfigError, StorageFailed

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
TENSORS, VALUES, MANIFEST = "state.safetensors", "values.json", "manifest.json"
MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # the last: a link that leads to itself
MAX_BYTES = 64 << 10  # a manifest has some hundreds


@dataclass(frozen=True, kw_only=True)
class Content:
    """A file as it was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What makes up the checkpoint of one step."""

    step: int
    files: dict[str, Content]


def encode_manifest(manifest: Manifest) -> bytes:
    """There is one way to write a manifest, so that a reader can insist on every byte, its own hash included."""
    files = {name: {"size": content.size_bytes, "sha256": content.sha256} for name, content in manifest.files.items()}
    return _seal({"format": FORMAT, "step": manifest.step, "files": files})


def decode_manifest(text: bytes) -> Manifest:
    """`ValueError` for anything that `encode_manifest` does not write, `ConfigError` for a later format."""
    try:
        fields = json.loads(text)
        said = fields.pop("sha256")
        if text != _seal(fields):
            raise ValueError(f"its own hash is not {str(said)[:16]}")
        if type(fields["format"]) is int and fields["format"] > FORMAT:
            why = (
                f"the checkpoint has format {fields['format']}, this Echelon reads {FORMAT}; use the one that wrote it"
            )
            raise ConfigError("resume", why)
        files = {
            name: Content(size_bytes=_number(file["size"]), sha256=str(file["sha256"]))
            for name, file in fields["files"].items()
        }
        step = _number(fields["step"])
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if fields["format"] != FORMAT or files.keys() != {TENSORS, VALUES} or step < 0:
        raise ValueError("it describes no checkpoint")
    return Manifest(step=step, files=files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at `folder`, whose files are there and have the sizes it says."""
    if not os.path.lexists(folder):
        raise StorageFailed(str(folder), "there is no checkpoint here")
    path = folder / MANIFEST
    with open_part(path) as file, reading(path):
        if file.size_bytes > MAX_BYTES:
            raise CheckpointCorrupt(str(path), f"has {file.size_bytes} bytes, which no manifest has")
        text = file.take(file.size_bytes)
    try:
        manifest = decode_manifest(text)
    except ValueError as error:
        raise CheckpointCorrupt(str(path), f"is not what was written ({error})") from error
    for name, content in manifest.files.items():
        with open_part(folder / name) as file:
            if file.size_bytes != content.size_bytes:
                raise CheckpointCorrupt(
                    str(folder / name), f"has {file.size_bytes} bytes instead of {content.size_bytes}"
                )
    return manifest


def open_part(path: Path) -> HashedInput:
    """A file of a checkpoint that is there: if the file is not, that is corruption and no mistake of the caller's."""
    try:
        with reading(path):
            return HashedInput(path)
    except StorageFailed as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in MISSING:
            raise CheckpointCorrupt(str(path), "is missing") from error
        raise


def _seal(fields: dict[str, Any]) -> bytes:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    sealed = {**fields, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}
    return (json.dumps(sealed, sort_keys=True, indent=1) + "\n").encode()


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value
