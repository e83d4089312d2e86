"""The parts of a plan that carry numbers: servers, agreement, codec. None can be made that means nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from echelon.errors import ConfigError

LARGEST = 10**6
ZERO_STAGES = ("zero1", "zero2", "zero3")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zerobubble")
TOPOLOGIES = ("ring", "tree", "star", "hier")
READS = ("strong", "eventual")
RULES = ("sync", "async", "bounded", "local")
FRACTIONS = ("topk", "randk")
CODECS = ("fp16", "bf16", "int8", "int4", "sign", *FRACTIONS, "lowrank", "adapt")


@dataclass(frozen=True, kw_only=True)
class Served:
    """Parameter servers: how many, and how workers reach them.

    `replicas`: copies of each server's state, the first included. `groups`: synchronous inside each, the agreement
    between them (`None`: every worker by itself). `tiers=2`: a server for each group in between. `reads`: strong is
    "I read what I wrote".
    """

    servers: int = 1
    replicas: int = 1
    tiers: int = 1
    groups: int | None = None
    reads: str = "eventual"

    def __post_init__(self) -> None:
        for name in ("servers", "replicas"):
            require_whole(f"ps:{name}={getattr(self, name)}", getattr(self, name), f"ps:{name}=2")
        if self.groups is not None:
            require_whole(f"ps:groups={self.groups}", self.groups, "ps:groups=2")
        if type(self.tiers) is not int or self.tiers not in {1, 2}:
            raise ConfigError(f"ps:tiers={self.tiers}", "there are one or two tiers: tiers=1 (the default) or tiers=2")
        if self.reads not in READS:
            raise ConfigError(
                f"ps:reads={self.reads}", "reads are strong (what I wrote I read) or eventual (the default)"
            )

    def __str__(self) -> str:
        default = Served()
        names = ("servers", "replicas", "tiers", "groups", "reads")
        options = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(default, name)]
        return "ps:" + ",".join(options) if options else "ps"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """When replicas agree. `steps` is the K of `bounded:K` or the H of `local:H`.

    `sites`: synchronous inside each, `local` between them (`None`: every worker is one).
    """

    rule: str = "sync"
    steps: int | None = None
    sites: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(str(self.rule), "replicas agree by sync, async, bounded:K or local:H")
        if self.rule == "bounded":
            require_whole(str(self), self.steps, "bounded:4, a slice then misses at most the last 4 steps", low=0)
        elif self.rule == "local":
            require_whole(str(self), self.steps, "local:50, 50 local steps between agreements")
        elif self.steps is not None:
            raise ConfigError(str(self), f"{self.rule} takes no number; write {self.rule}")
        if self.sites is not None:
            if self.rule != "local":
                raise ConfigError(str(self), "only local:H has sites, e.g. local:50,sites=2")
            require_whole(str(self), self.sites, "local:50,sites=2")

    def __str__(self) -> str:
        steps = "" if self.steps is None else f":{self.steps}"
        return f"{self.rule}{steps}" + ("" if self.sites is None else f",sites={self.sites}")


@dataclass(frozen=True, kw_only=True)
class Codec:
    """What goes over the wire. `amount` is the fraction that `topk` and `randk` keep, or the rank of `lowrank`."""

    name: str
    amount: float | int | None = None

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise ConfigError(str(self.name), f"no such codec; there are {listed(CODECS)}")
        if self.name in FRACTIONS:
            good = type(self.amount) in {int, float} and self.amount is not None and isfinite(self.amount)
            if not good or not 0 < float(self.amount or 0) <= 1:
                why = f"needs the fraction of the entries to send, above 0 and at most 1, e.g. {self.name}:0.01"
                raise ConfigError(str(self), why)
        elif self.name == "lowrank":
            require_whole(str(self), self.amount, "lowrank:2, the rank of the two factors")
        elif self.amount is not None:
            raise ConfigError(str(self), f"{self.name} takes no number; write {self.name}")

    def __str__(self) -> str:
        if self.amount is None:
            return self.name
        amount = int(self.amount) if self.amount == 1 else self.amount
        return f"{self.name}:{amount!r}"


def require_whole(term: str, number: object, example: str, low: int = 1) -> None:
    """Refuse what is no count, where booleans are none either."""
    if type(number) is not int or not low <= number <= LARGEST:
        raise ConfigError(term, f"needs a whole number from {low} to {LARGEST}, e.g. {example}")


def no_pipeline(schedule: str) -> str:
    """Why a schedule cannot stand alone."""
    return f"is a pipeline schedule and no pipeline is asked for; write e.g. pp2+{schedule}"


def listed(names: Iterable[str]) -> str:
    """`ring, tree, star and hier`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
