"""State that outlives the run: written beside and renamed, hashed, verified before it is loaded."""

from __future__ import annotations

from echelon.checkpoint.digest import digest
from echelon.checkpoint.export import write_model
from echelon.checkpoint.folder import read, verify, write
from echelon.checkpoint.keeper import Keeper, Written
from echelon.checkpoint.tensors import read_tensors, write_tensors
from echelon.checkpoint.text import pack, unpack

__all__ = [
    "Keeper",
    "Written",
    "digest",
    "pack",
    "read",
    "read_tensors",
    "unpack",
    "verify",
    "write",
    "write_model",
    "write_tensors",
]
