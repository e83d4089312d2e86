"""A checkpoint is a folder that is either there and whole, or not there.

    step-00000120/
        state.safetensors     every tensor once
        values.json           plain values, and which names are aliases of one tensor
        manifest.json         step, size and SHA-256 of the two, and of itself

It is written as a hidden sibling, flushed, and renamed; a reader loads nothing that the manifest does not vouch for.
A crash leaves at most hidden siblings, which the next write takes away:

    .step-00000120.writing     not finished
    .step-00000120.replaced    the old one of that step, while a new one takes its place
    .step-00000120.removed     on its way out
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.checkpoint.disk import CHUNK_BYTES, HashedFile, HashedInput, exchange, reading, sync_folder
from echelon.checkpoint.manifest import MANIFEST, TENSORS, VALUES, Content, Manifest, encode_manifest, read_manifest
from echelon.checkpoint.tensors import check_storable, find_ties, read_tensors, stream_tensors
from echelon.checkpoint.text import pack, unpack
from echelon.errors import CheckpointCorrupt, ConfigError, StorageFailed
from echelon.state import State
from echelon.storage import writing

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

DIGITS = "([0-9]{8}|[1-9][0-9]{8,})"
NAME = re.compile(f"step-{DIGITS}")
LEFTOVER = re.compile(rf"\.step-{DIGITS}\.(writing|replaced|removed)")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A state as it goes to the disk: nothing in it is shared with the training but the tensors' memory."""

    step: int
    tensors: dict[str, Tensor]
    text: bytes


def write(folder: Path, state: State) -> Path:
    """Writes the checkpoint of `state.step` into `folder` and returns its path. The disk holds it when this returns."""
    return write_snapshot(folder, snapshot(state))


def read(path: Path) -> State:
    """The state saved at `path`. `CheckpointCorrupt` unless every byte is the one that was written."""
    path = _standing(path)
    manifest = _vouched(path)
    text = _read_text(path / VALUES, manifest.files[VALUES])
    tensors = read_tensors(path / TENSORS, manifest.files[TENSORS].sha256)
    try:
        content = json.loads(text)
        inside = {name: tensors.pop(name) for name in content["inside"]}
        tensors |= {alias: tensors[name] for alias, name in content["aliases"].items()}
        values = unpack(content["values"], inside)
        if not isinstance(values, dict):
            raise TypeError(f"the values are {type(values).__name__}")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(str(path), f"{VALUES} does not fit the tensors ({error})") from error
    return State(step=manifest.step, tensors=tensors, values=values)


def verify(path: Path) -> None:
    """`CheckpointCorrupt` unless `read` would load it. Needs no memory for the tensors."""
    path = _standing(path)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name, content in _vouched(path).files.items():
        with reading(path / name), HashedInput(path / name) as file:
            for start in range(0, file.size_bytes, CHUNK_BYTES):
                file.fill(buffer[: file.size_bytes - start])
            _check_hash(path / name, file, content)


def check_outline(path: Path) -> None:
    """As `verify`, by the manifest and the sizes alone: for checkpoints known to have been whole."""
    _vouched(_standing(path))


def list_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, whole or not, in rising order."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageFailed(str(folder), f"cannot be read: {os.strerror(error.errno or 0)}") from error
    found = {match[1] for name in names if (match := NAME.fullmatch(name))}
    # Between the two renames of a replacement only the old one stands; `_standing` finds it.
    found |= {match[1] for name in names if (match := LEFTOVER.fullmatch(name)) and match[2] == "replaced"}
    return sorted(int(digits) for digits in found)


def path_of(folder: Path, step: int) -> Path:
    assert step >= 0
    return folder / f"step-{step:08d}"


def snapshot(state: State) -> Snapshot:
    """Checks that `state` can be saved (`ConfigError` names what cannot) and takes its plain values down as text."""
    inside: dict[str, Tensor] = {}
    values = pack(state.values, inside)
    if clash := inside.keys() & state.tensors.keys():
        raise ConfigError(min(clash), "is the name of two tensors")
    tensors = {**state.tensors, **inside}
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    # Apart, so that a tensor of the values never becomes the only copy of a tensor of the model.
    aliases = find_ties(state.tensors)
    content = {"aliases": aliases, "inside": sorted(inside), "values": values}
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return Snapshot(step=state.step, tensors={name: t for name, t in tensors.items() if name not in aliases}, text=text)


def write_snapshot(folder: Path, taken: Snapshot) -> Path:
    final = path_of(folder, taken.step)
    with writing(final):
        _make_folder(folder)
        remove_leftovers(folder)
        beside = _beside(final, "writing")
        try:
            beside.mkdir()
            _write_files(beside, taken)
            sync_folder(beside)
            _put_in_place(beside, final)
        except Exception:
            _delete(beside)
            raise
    return final


def remove(path: Path) -> None:
    """Takes a checkpoint away; a crash in between leaves no half of one under its name."""
    with writing(path):
        gone = _beside(path, "removed")
        _delete(gone)
        path.rename(gone)
        # What cannot be deleted now (a network file system keeps open files) is tried again by the next write.
        _delete(gone)


def remove_leftovers(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        if not (match := LEFTOVER.fullmatch(entry.name)):
            continue
        final = folder / f"step-{match[1]}"
        if match[2] == "replaced" and not os.path.lexists(final):
            entry.rename(final)
            sync_folder(folder)
        else:
            _delete(entry)


def _delete(path: Path) -> None:
    """As far as that is possible; also a file or a link that somebody has put in a checkpoint's place."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def _write_files(beside: Path, taken: Snapshot) -> None:
    state = stream_tensors(beside / TENSORS, taken.tensors, {"format": "pt"})
    with HashedFile(beside / VALUES) as values:
        values.write(taken.text)
    written = {TENSORS: state, VALUES: values}
    files = {name: Content(size_bytes=file.size_bytes, sha256=file.sha256) for name, file in written.items()}
    with HashedFile(beside / MANIFEST) as manifest:
        manifest.write(encode_manifest(Manifest(step=taken.step, files=files)))


def _put_in_place(beside: Path, final: Path) -> None:
    if not os.path.lexists(final):
        beside.rename(final)
        sync_folder(final.parent)
        return
    if exchange(beside, final):
        sync_folder(final.parent)
        _delete(beside)
        return
    old = _beside(final, "replaced")
    final.rename(old)
    beside.rename(final)
    sync_folder(final.parent)
    _delete(old)


def _beside(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def _read_text(path: Path, content: Content) -> bytes:
    with reading(path), HashedInput(path) as file:
        text = file.take(file.size_bytes)
        _check_hash(path, file, content)
        return text


def _standing(path: Path) -> Path:
    """Where the checkpoint is: at `path`, or beside it if a crash interrupted its replacement."""
    if not NAME.fullmatch(path.name) or os.path.lexists(path):
        return path
    old = _beside(path, "replaced")
    return old if os.path.lexists(old) else path


def _vouched(path: Path) -> Manifest:
    """The manifest at `path`, which must also be the one of the step that the folder is named after."""
    manifest = read_manifest(path)
    if _digits(path.name) not in (None, path_of(path, manifest.step).name[5:]):
        raise CheckpointCorrupt(str(path), f"is the checkpoint of step {manifest.step} under another's name")
    return manifest


def _digits(name: str) -> str | None:
    match = NAME.fullmatch(name) or LEFTOVER.fullmatch(name)
    return match[1] if match else None


def _check_hash(path: Path, file: HashedInput, content: Content) -> None:
    if file.sha256 != content.sha256:
        raise CheckpointCorrupt(str(path), "its content is not what was written (SHA-256 differs)")
