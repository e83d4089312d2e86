"""A checkpoint comes back as the state it was, and its folder is what the documentation says."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from echelon.checkpoint import folder as module
from echelon.checkpoint import manifest as manifests
from echelon.checkpoint import read, verify, write
from echelon.checkpoint.folder import list_steps
from echelon.checkpoint.manifest import encode_manifest
from echelon.errors import CheckpointCorrupt, ConfigError, StorageFailed
from echelon.state import State


def make_state(step=7, fill=1.0):
    weight = torch.full((3, 2), fill)
    return State(
        step=step,
        tensors={"model/a": weight, "model/b": torch.arange(4), "optimizer/a/exp_avg": torch.zeros(3, 2)},
        values={"epoch": 2, "schedule": {"milestones": {5: 1}}, "loss": float("inf"), "order": (1, 2)},
    )


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


def assert_same(one, other):
    assert one.step == other.step
    assert one.values == other.values
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name


def test_a_state_comes_back_equal(tmp_path):
    path = write(tmp_path / "run" / "checkpoints", make_state())
    assert path == tmp_path / "run" / "checkpoints" / "step-00000007"
    assert names_in(path) == ["manifest.json", "state.safetensors", "values.json"]
    assert names_in(path.parent) == ["step-00000007"]
    verify(path)
    assert_same(read(path), make_state())


def test_an_empty_state_comes_back(tmp_path):
    assert_same(read(write(tmp_path, State(step=0))), State(step=0))


def test_odd_tensors_come_back_equal(tmp_path):
    state = State(
        step=1,
        tensors={
            "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 4),
            "turned": torch.randn(4, 5).t(),
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "parameter": torch.nn.Parameter(torch.randn(3)),
            "flags": torch.tensor([True, False]),
        },
    )
    back = read(write(tmp_path, state))
    assert_same(back, state)
    assert not any(tensor.requires_grad for tensor in back.tensors.values())


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.randn(1000)
    state = State(step=1, tensors={"b": weight, "a": weight.view(1000), "part": weight[:10], "other": weight.clone()})
    path = write(tmp_path, state)
    assert (path / "state.safetensors").stat().st_size < 2.5 * 4000
    back = read(path)
    assert_same(back, state)
    assert back.tensors["a"].data_ptr() == back.tensors["b"].data_ptr()
    assert_same(read(write(tmp_path / "again", back)), state)


def test_tensors_inside_the_values_come_back_in_their_place(tmp_path):
    weight = torch.randn(3)
    state = State(step=1, tensors={"model/w": weight}, values={"ema": [weight, {"x": torch.ones(2, 2)}]})
    back = read(write(tmp_path, state))
    assert back.tensors.keys() == {"model/w"}
    assert torch.equal(back.values["ema"][0], weight)
    assert torch.equal(back.values["ema"][1]["x"], torch.ones(2, 2))


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    for state in (
        State(step=1, values={"f": print}),
        State(step=1, tensors={"w": torch.zeros(1, dtype=torch.complex128)}),
        State(step=1, tensors={"values['t']": torch.zeros(1)}, values={"t": torch.zeros(1)}),
    ):
        with pytest.raises(ConfigError):
            write(tmp_path / "new", state)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("swaps", [True, False])
def test_the_same_step_is_replaced(swaps, tmp_path, monkeypatch):
    if not swaps:
        monkeypatch.setattr(module, "exchange", lambda one, other: False)
    write(tmp_path, make_state(fill=1))
    path = write(tmp_path, make_state(fill=2))
    assert_same(read(path), make_state(fill=2))
    assert names_in(tmp_path) == ["step-00000007"]


def test_steps_are_listed_in_order_and_nothing_else_is(tmp_path):
    assert list_steps(tmp_path / "none") == []
    for step in (20, 3, 100_000_000):
        write(tmp_path, make_state(step))
    for name in (
        "step-5",
        "step-000000009",
        "step-00000004x",
        ".step-00000004.writing",
        "notes",
        "step-" + "\u0661" * 8,
    ):
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == [3, 20, 100_000_000]


def test_a_folder_that_is_a_file_is_a_storage_failure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed):
        list_steps(tmp_path / "file")
    with pytest.raises(StorageFailed):
        write(tmp_path / "file", make_state())
    with pytest.raises(StorageFailed):
        write(tmp_path / "file" / "below", make_state())


def test_reading_what_is_not_there_is_a_storage_failure(tmp_path):
    with pytest.raises(StorageFailed, match="no checkpoint"):
        read(tmp_path / "step-00000001")


def test_leftovers_of_a_crash_are_taken_away_by_the_next_write(tmp_path):
    for name in (".step-00000003.writing", ".step-00000009.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.safetensors").write_bytes(b"half")
    (tmp_path / ".mine").mkdir()
    write(tmp_path, make_state())
    assert names_in(tmp_path) == [".mine", "step-00000007"]


def test_a_checkpoint_caught_between_two_renames_is_found_and_put_back(tmp_path):
    write(tmp_path, make_state())
    (tmp_path / "step-00000007").rename(tmp_path / ".step-00000007.replaced")
    assert list_steps(tmp_path) == [7]
    assert_same(read(tmp_path / "step-00000007"), make_state())
    write(tmp_path, make_state(8))
    assert names_in(tmp_path) == ["step-00000007", "step-00000008"]


def test_a_checkpoint_may_be_copied_anywhere_but_not_pass_for_another_step(tmp_path):
    path = write(tmp_path, make_state())
    assert_same(read(path.rename(tmp_path / "best")), make_state())
    (tmp_path / "best").rename(tmp_path / "step-00000008")
    with pytest.raises(CheckpointCorrupt, match="step 7 under another"):
        read(tmp_path / "step-00000008")


def test_a_relative_path_will_do(tmp_path, monkeypatch):
    path = write(tmp_path, make_state())
    monkeypatch.chdir(path)
    assert_same(read(type(path)(".")), make_state())


def test_the_manifest_is_what_the_documentation_says(tmp_path):
    path = write(tmp_path, make_state())
    manifest = json.loads((path / "manifest.json").read_text())
    seal = manifest.pop("sha256")
    assert hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest() == seal
    assert manifest["step"] == 7
    for name in ("state.safetensors", "values.json"):
        content = (path / name).read_bytes()
        assert manifest["files"][name] == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_checkpoint_of_a_later_format_is_not_called_corrupt(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "FORMAT", 2)
    path = write(tmp_path, make_state())
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 2"):
        read(path)


def test_the_same_state_is_the_same_bytes(tmp_path):
    one, two = write(tmp_path / "a", make_state()), write(tmp_path / "b", make_state())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names_in(one))


def reseal(path, text):
    """Puts another values.json into a checkpoint, with a manifest that vouches for it."""
    (path / "values.json").write_bytes(text)
    content = (path / "state.safetensors").read_bytes()
    files = {
        name: manifests.Content(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in (("state.safetensors", content), ("values.json", text))
    }
    (path / "manifest.json").write_bytes(encode_manifest(manifests.Manifest(step=7, files=files)))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"aliases":{},"inside":[],"values":{"~":"nothing","v":[]}}',
        b'{"aliases":{"x":"none"},"inside":[],"values":{}}',
        b'{"aliases":{},"inside":["none"],"values":{}}',
        b'{"aliases":{},"inside":[],"values":{"t":{"~":"tensor","v":"none"}}}',
        b'{"aliases":{},"inside":[],"values":' + b"[" * 50_000,
    ],
)
def test_forged_values_are_corrupt_too(text, tmp_path):
    path = write(tmp_path, make_state())
    reseal(path, text)
    with pytest.raises(CheckpointCorrupt):
        read(path)


def test_forged_values_that_fit_are_read(tmp_path):
    path = write(tmp_path, make_state())
    reseal(path, b'{"aliases":{"c":"model/a"},"inside":[],"values":{"x":1}}')
    assert read(path).values == {"x": 1}
