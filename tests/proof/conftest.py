"""Proofs fork this process several times each: what the forks need is loaded once, here."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo
import torch.optim

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


# One thread from the start: a pool of threads would not survive the forks.
torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="Detected call of .lr_scheduler.step", category=UserWarning)
