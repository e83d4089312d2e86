"""What torch asks every process group about itself: its rank, its size and its names."""

from __future__ import annotations

import torch.distributed as dist

# mypy: disable-error-code="override"


class NamedGroup(dist.ProcessGroup):
    """A group as far as it is known by rank, size and name; torch asks for them in two spellings."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._name = rank, size, name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "echelon"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return ""

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    getRank, getSize, getBackendName = rank, size, name  # noqa: N815
