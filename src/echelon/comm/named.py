"""What torch asks every process group about itself: its rank, its size, its names and its devices."""

from __future__ import annotations

import torch
import torch.distributed as dist

# mypy: disable-error-code="override"


class NamedGroup(dist.ProcessGroup):
    """A group as far as it is known by rank, size and name; torch asks for them in two spellings."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._name = rank, size, name
        self._description = ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "echelon"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors may be, the CPU first: what moves objects and checkpoints asks."""
        return [torch.device(name) for name in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        """What carries the tensors of a device. torch's own groups have a backend for each; this one is its own."""
        if torch.device(device.type) not in self._device_types:
            raise RuntimeError(f"the group has no backend for {device}")
        return self

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    getRank, getSize, getBackendName = rank, size, name  # noqa: N815
