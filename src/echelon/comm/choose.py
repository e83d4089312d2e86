"""Which topology carries a collective when the plan does not say: by its size, and by where the ranks are."""

from __future__ import annotations

from echelon.comm.collectives import TOPOLOGIES, HostsKey

SMALL_BYTES = 32 << 10
"""Below, messages cost more than bytes."""

_CHOICES = {
    "all_reduce": TOPOLOGIES,
    "reduce_scatter": TOPOLOGIES,
    "all_gather": TOPOLOGIES,
    "broadcast": ("star", "ring", "tree", "hier"),
    "reduce": ("star", "ring", "tree", "hier"),
    "barrier": ("star", "tree"),
}
"""What each collective can be run as. Those that are not here can only be sent directly."""


def choose_topology(kind: str, size_bytes: int, hosts: HostsKey, wanted: str | None = None) -> str:
    """The topology of one collective; `wanted` is the plan's word for it."""
    choices = _CHOICES.get(kind)
    if choices is None:
        return "direct"
    if wanted in choices:
        return wanted
    ranks = sum(map(len, hosts))
    if len(hosts) > 1 and any(len(host) > 1 for host in hosts) and "hier" in choices:
        return "hier"
    if kind == "all_reduce" and size_bytes <= SMALL_BYTES:
        return "exchange" if ranks == 2 else "star" if ranks <= 16 else "tree"
    if kind == "broadcast" and ranks > 8:
        return "tree" if size_bytes <= SMALL_BYTES else "ring"
    return "star" if kind in ("barrier", "reduce", "broadcast") else "direct"


def cut(count: int, pieces: int, grain: int = 16) -> list[tuple[int, int]]:
    """Bounds of nearly equal pieces of `count` elements; long ones begin at multiples of `grain`."""
    if count >= pieces * grain * 64:
        bounds = [min(count, (count * i // pieces + grain - 1) // grain * grain) for i in range(pieces)]
    else:
        bounds = [count * i // pieces for i in range(pieces)]
    return list(zip(bounds, [*bounds[1:], count], strict=True))
