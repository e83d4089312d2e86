"""What torch calls of a process group is not for `torch.compile`, even where it is called within a compiled function.

DDP does so: its reducer calls the group from C++, and dynamo would trace the frame that it sees.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

T = TypeVar("T")


def uncompiled(kind: type[T]) -> type[T]:
    """A class whose methods, with all that they call, dynamo leaves alone. `torch.compiler.disable` would say the same,
    and import the compiler into every program. A torch that has no such switch leaves the class as it is.
    """
    switch: Any = eval_frame
    if not hasattr(switch, "set_code_exec_strategy"):
        return kind
    skip = switch._FrameExecStrategy(switch._FrameAction.SKIP, switch._FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            switch.set_code_exec_strategy(method.__code__, skip)
    return kind
