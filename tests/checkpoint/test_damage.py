"""Whatever happens to the bytes of a checkpoint, it is refused; never is a state loaded that was not saved."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil

import pytest
import torch

from echelon.checkpoint import read, verify, write
from echelon.checkpoint.folder import remove
from echelon.checkpoint.manifest import Content, Manifest, encode_manifest
from echelon.errors import CheckpointCorrupt, StorageFailed
from echelon.state import State

FILES = ("state.safetensors", "values.json", "manifest.json")


def make_state(step=5):
    tied = torch.arange(3.0)
    return State(step=step, tensors={"a": tied, "b": tied, "c": torch.zeros(0)}, values={"k": (1, 2.5), "n": {3: "x"}})


@pytest.fixture
def path(memory_path):
    return write(memory_path, make_state())


def assert_refused(path):
    with pytest.raises(CheckpointCorrupt):
        read(path)
    with pytest.raises(CheckpointCorrupt):
        verify(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_anywhere_is_refused(name, path):
    content = (path / name).read_bytes()
    for size in range(len(content)):
        (path / name).write_bytes(content[:size])
        assert_refused(path)
    (path / name).write_bytes(content)
    assert read(path).values == make_state().values


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_refused(name, path):
    content = (path / name).read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            (path / name).write_bytes(changed)
            with pytest.raises(CheckpointCorrupt):
                read(path)
    (path / name).write_bytes(content)
    verify(path)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_also_seen_when_only_verifying(name, path):
    content = (path / name).read_bytes()
    for place in range(len(content)):
        (path / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CheckpointCorrupt):
            verify(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tail", [b"\x00", b"\n", b" " * 100_000])
def test_a_file_that_grew_is_refused(name, tail, path):
    with (path / name).open("ab") as file:
        file.write(tail)
    assert_refused(path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_replaced_file_is_refused(name, path):
    (path / name).unlink()
    assert_refused(path)
    (path / name).mkdir()
    assert_refused(path)
    (path / name).rmdir()
    os.mkfifo(path / name)
    assert_refused(path)
    (path / name).unlink()
    (path / name).symlink_to("nowhere")
    assert_refused(path)


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_checkpoints_do_not_mix(name, path, memory_path):
    state = make_state(6)
    state.tensors["a"] = state.tensors["a"] + 1
    state.values["k"] = (2, 2.5)
    other = write(memory_path, state)
    shutil.copy(other / name, path / name)
    assert_refused(path)


def test_a_file_in_place_of_the_folder_is_refused(path):
    shutil.rmtree(path)
    path.write_bytes(b"")
    assert_refused(path)


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, CheckpointCorrupt), (errno.EACCES, StorageFailed)])
def test_a_bad_sector_is_corruption_and_a_closed_door_is_not(code, kind, path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(code, "no")

    monkeypatch.setattr(os, "readv", fail)
    with pytest.raises(kind):
        read(path)
    with pytest.raises(kind):
        verify(path)


@pytest.mark.parametrize("name", ["", *FILES])
def test_a_link_that_leads_to_itself_is_refused(name, path):
    if name:
        (path / name).unlink()
    else:
        shutil.rmtree(path)
    (path / name).symlink_to(path / name)
    assert_refused(path)


@pytest.mark.parametrize("values", ["null", "[]", "7"])
def test_values_that_are_none_are_refused_although_the_manifest_vouches_for_them(values, path):
    text = f'{{"aliases":{{}},"inside":[],"values":{values}}}'.encode()
    (path / "values.json").write_bytes(text)
    files = {
        name: Content(size_bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        for name, file in ((name, path / name) for name in FILES[:2])
    }
    (path / "manifest.json").write_bytes(encode_manifest(Manifest(step=5, files=files)))
    with pytest.raises(CheckpointCorrupt, match="does not fit"):
        read(path)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path), lambda path: path.write_bytes(b"")])
def test_what_was_put_in_a_checkpoint_s_place_gives_way_to_a_new_one(make, path, memory_path):
    shutil.rmtree(path)
    make(path)
    for _ in range(2):  # the second time nothing that is left of the first is in the way
        write(memory_path, make_state())
    assert [entry.name for entry in memory_path.iterdir()] == [path.name]
    verify(path)
    shutil.rmtree(path)
    make(path)
    remove(path)
    assert list(memory_path.iterdir()) == []
