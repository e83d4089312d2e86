"""What torch calls of a process group is not for `torch.compile`, even where it is called within a compiled function.

DDP does so: its reducer calls the group from C++, and dynamo would trace the frame that it sees.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")


def uncompiled(kind: type[T]) -> type[T]:
    """A class whose methods, with all that they call, dynamo leaves alone. `torch.compiler.disable` would say the same,
    and import the compiler into every program.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            set_code_exec_strategy(method.__code__, skip)
    return kind
