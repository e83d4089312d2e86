"""What forward changes although only the optimizer should: no rule of ours orders it, so rank 0's counts."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from zlib import crc32

from torch import Tensor, nn

from echelon.comm import Group
from echelon.errors import ConfigError


def share_changes(module: nn.Module, changed: AbstractSet[str], group: Group) -> None:
    """Give every worker rank 0's, as under DDP: the workers must not drift apart. `changed` are the names seen here."""
    during = "sharing what forward changes"
    kept = module.state_dict(keep_vars=True)  # what is not in it is a cache, and each worker's own
    forms = repr([(name, tuple(t.shape), t.dtype) for name, t in kept.items() if isinstance(t, Tensor)])
    said = group.gather([sorted(changed & kept.keys()), crc32(forms.encode())], during)
    names = sorted(set().union(*(theirs for theirs, _ in said)))
    if len({form for _, form in said}) > 1:
        raise ConfigError(
            "model", f"forward gives one of {', '.join(names)} another shape or type on each worker; keep its shape"
        )
    for name in names:
        group.broadcast(kept[name], during)
