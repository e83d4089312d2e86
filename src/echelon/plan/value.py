"""A plan as a value: frozen, valid whenever it exists, and written in one way only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from echelon.errors import ConfigError
from echelon.plan.grammar import read_plan
from echelon.plan.parts import (
    SCHEDULES,
    TOPOLOGIES,
    ZERO_STAGES,
    Agreement,
    Codec,
    Served,
    listed,
    no_pipeline,
    require_whole,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to train a job. `dp=None`: the workers that are left; `topology=None`: chosen by size and hosts."""

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    topology: str | None = None
    server: Served | None = None
    agreement: Agreement = field(default_factory=Agreement)
    codec: Codec | None = None
    zstd: bool = False

    def __post_init__(self) -> None:
        for axis in ("dp", "tp", "pp"):
            if axis != "dp" or self.dp is not None:
                require_whole(f"{axis}{getattr(self, axis)}", getattr(self, axis), f"{axis}2")
        if type(self.zero) is not int or self.zero not in {0, 1, 2, 3}:
            raise ConfigError(f"zero{self.zero}", f"the stages are {listed(ZERO_STAGES)}")
        if self.schedule not in SCHEDULES:
            raise ConfigError(str(self.schedule), f"no such pipeline schedule; there are {listed(SCHEDULES)}")
        if self.topology is not None and self.topology not in TOPOLOGIES:
            raise ConfigError(str(self.topology), f"no such topology; there are {listed(TOPOLOGIES)}")
        for name, kind in (
            ("server", Served | None),
            ("agreement", Agreement),
            ("codec", Codec | None),
            ("zstd", bool),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(name, f"cannot be {getattr(self, name)!r}; write the plan as text, with Plan.parse")
        for term, why in _contradictions(self):
            raise ConfigError(term, why)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that `text` says, or a ConfigError with the term at fault and what would be right."""
        return cls(**read_plan(text))

    @classmethod
    def of(cls, plan: Plan | str) -> Plan:
        """A plan from either form that the public functions take."""
        if isinstance(plan, Plan):
            return plan
        return cls.parse(plan)

    def terms(self) -> dict[str, str]:
        """The terms of the canonical text by feature: `{"dp": "dp4", "local": "local:8", "int8": "int8"}`."""
        found = self._axes()
        if self.zero:
            found[f"zero{self.zero}"] = f"zero{self.zero}"
        if self.schedule != "1f1b":
            found[self.schedule] = self.schedule
        if self.topology:
            found[self.topology] = self.topology
        if self.server:
            found["ps"] = str(self.server)
        if self.agreement.rule != "sync":
            found[self.agreement.rule] = str(self.agreement)
        if self.codec:
            found[self.codec.name] = str(self.codec)
        if self.zstd:
            found["zstd"] = "zstd"
        return found

    def mesh(self) -> str:
        """The mesh part of the canonical text."""
        return ".".join(self._axes().values())

    def __str__(self) -> str:
        axes = self._axes()
        return "+".join([self.mesh(), *(text for name, text in self.terms().items() if name not in axes)])

    def resolve(self, workers: int) -> Plan:
        """This plan on exactly so many workers: `dp` gets its number, and no worker is left without work."""
        require_whole("workers", workers, "--workers 2")
        others = self.tp * self.pp
        needed = others * (self.dp or 1)
        if workers < needed:
            why = f"needs {_workers(needed)} and there {'is' if workers == 1 else 'are'} {workers}"
            raise ConfigError(self.mesh(), f"{why}; use --workers {needed} or smaller axes")
        if self.dp is not None and workers > needed:
            free = ".".join(["dp", *(text for axis, text in self._axes().items() if axis != "dp")])
            why = f"uses {needed} of {workers} workers; use --workers {needed}"
            raise ConfigError(self.mesh(), f"{why}, or write {free}, where dp takes the workers that are left")
        if workers % others:
            fewer = workers - workers % others
            why = f"needs a multiple of {others} workers and there are {workers}"
            raise ConfigError(self.mesh(), f"{why}; use --workers {fewer} or {fewer + others}")
        return replace(self, dp=workers // others)

    def _axes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.dp != 1 or (self.tp == 1 and self.pp == 1):
            found["dp"] = "dp" if self.dp is None else f"dp{self.dp}"
        found |= {axis: f"{axis}{size}" for axis, size in (("tp", self.tp), ("pp", self.pp)) if size > 1}
        return found


def _contradictions(plan: Plan) -> Iterator[tuple[str, str]]:
    """Each pair of terms that cannot both hold, as the term to change and what would be right."""
    agreement = plan.agreement
    if plan.schedule != "1f1b" and plan.pp == 1:
        yield plan.schedule, no_pipeline(plan.schedule)
    if plan.server:
        if plan.topology:
            yield plan.topology, "is for collectives and ps sends gradients to servers; leave one of the two out"
        if plan.zero:
            yield (
                f"zero{plan.zero}",
                "shards what the servers of ps hold already; leave it out and write e.g. ps:servers=2",
            )
        if agreement.sites:
            why = f"a server plan says with groups who is synchronous inside; write ps:groups={agreement.sites}"
            yield str(agreement), f"{why}+{replace(agreement, sites=None)}"
    elif agreement.rule in {"async", "bounded"}:
        yield str(agreement), f"needs a server that applies one worker's update at a time; write ps+{agreement}"
    if plan.zero and agreement.rule == "local" and agreement.sites is None:
        why = f"shards over workers that agree every step and {agreement} leaves every worker alone"
        yield f"zero{plan.zero}", f"{why}; give it sites, e.g. {agreement},sites=2"
    groups = plan.server.groups if plan.server else None
    for name, count in (("sites", agreement.sites), ("groups", groups)):
        if plan.dp is not None and count is not None and count > plan.dp:
            why = f"there cannot be more {name} than dp workers; use {name}={plan.dp} or more workers"
            yield str(agreement if name == "sites" else plan.server), why


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
