"""The exported model is what any safetensors reader expects, and there is never half of one."""

from __future__ import annotations

import errno
import os

import pytest
import safetensors.torch
import torch
from torch import nn

from echelon.checkpoint import write_model
from echelon.errors import ConfigError, StorageFailed


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_the_file_loads_into_the_module_with_every_tied_name(tmp_path):
    model, other = Tied(), Tied()
    write_model(tmp_path / "run" / "model.safetensors", model.state_dict())
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "run" / "model.safetensors"), strict=True)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert names_in(tmp_path / "run") == ["model.safetensors"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(call, tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    write_model(path, {"a": torch.zeros(2)})
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageFailed, match=r"/model\.safetensors: cannot be written: No space left"):
        write_model(path, {"a": torch.ones(2)})
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["model.safetensors"]


def test_a_tensor_that_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(ConfigError) as refused:
        write_model(tmp_path / "model.safetensors", {"net.w": torch.zeros(1, dtype=torch.complex128)})
    assert refused.value.term == "net.w"
    assert names_in(tmp_path) == []
