"""The examples, and the small versions of them beside this file, are imported by name, as scripts in one folder are."""

from __future__ import annotations

import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  optimizers need it, and every fork of this process would load it again

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
sys.path[:0] = [str(HERE), str(EXAMPLES), str(EXAMPLES / "exercises")]
