"""The trained model as one plain safetensors file that any other program reads."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from echelon.checkpoint.disk import sync_folder
from echelon.checkpoint.tensors import stream_tensors
from echelon.storage import writing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


def write_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Puts the full weights at `path`, or leaves what is there. Tied tensors are written under each of their names,
    so that a reader that knows nothing of the ties finds every name of the module.
    """
    beside = path.with_name(f".{path.name}.writing")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # "format" is what other readers of such files look for.
            stream_tensors(beside, tensors, {"format": "pt"})
            beside.replace(path)
        except Exception:
            with suppress(OSError):
                beside.unlink()
            raise
        sync_folder(path.parent)
