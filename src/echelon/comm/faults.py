"""Which frames of a link meet with which fault, by rule: for tests of whatever depends on links.

    delay:peer=1,seconds=0.2                      everything to rank 1 leaves 0.2 s later, in order
    corrupt:rank=0,peer=1,kind=DATA,after=3       rank 0 damages the fourth and every later data frame to rank 1
    drop:op=all_reduce,seq=7; cut:peer=2,chance=0.01,seed=4

Pure: what is decided here is done by `faulty_link`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from echelon.comm.call import KINDS
from echelon.comm.collectives import ALL_TOPOLOGIES
from echelon.comm.frame import Header, Kind
from echelon.errors import ConfigError

FAULTS = {
    "delay": "it leaves `seconds` later, and what is behind it after it",
    "drop": "it is lost, and with it all that would follow on this link: the peer hears nothing more, and no end",
    "cut": "it is lost, and both ends find the link closed, as when a cable is pulled",
    "corrupt": "its byte number `byte`, or one in the middle, changes on its way, after the checksum was computed",
}
"""A transport that keeps order loses no frame out of the middle, so a loss is the loss of everything behind it."""
_NAMED = (Kind.DATA, Kind.READY, Kind.OFFER, Kind.GRANT, Kind.MESSAGE)
"""Frames that say to which operation they belong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fault, and the frames it happens to: those that rank `rank` sends to rank `peer`, of this kind (`Kind`), of
    this operation (`all_reduce`, `send`) and of this number among the calls of its group. What is None is any.

    Of these frames the first `after` pass, then every `every`-th is chosen, with the probability `chance`, until
    `count` were.
    """

    fault: str
    rank: int | None = None
    peer: int | None = None
    kind: str | None = None
    op: str | None = None
    seq: int | None = None
    after: int = 0
    every: int = 1
    count: int | None = None
    chance: float = 1.0
    seed: int = 0
    seconds: float = 0.0
    byte: int | None = None

    def __post_init__(self) -> None:
        words = {"fault": FAULTS, "kind": [kind.name for kind in Kind if kind != Kind.SKIP], "op": KINDS}
        for name, known in words.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ConfigError("faults", f"{name} {value!r} is none of {', '.join(known)}")
        for name, least in {
            "rank": 0,
            "peer": 0,
            "seq": 0,
            "after": 0,
            "every": 1,
            "count": 1,
            "seconds": 0,
            "byte": 0,
        }.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError("faults", f"{name}={value} of a {self.fault} must be at least {least}")
        if not 0 < self.chance <= 1:
            raise ConfigError("faults", f"chance={self.chance} of a {self.fault} must be above 0, and at most 1")
        if (self.fault == "delay") != (self.seconds > 0):
            raise ConfigError(
                "faults", f"a {self.fault} with seconds={self.seconds:g}; only a delay has them, and must"
            )

    def concerns(self, header: Header) -> bool:
        if self.kind is not None and Kind[self.kind] != header.kind:
            return False
        if self.seq is not None and self.seq != header.seq:
            return False
        return self.op is None or (header.kind in _NAMED and KINDS[header.call.op // len(ALL_TOPOLOGIES)] == self.op)


class Chooser:
    """Applies rules to the frames of one link, in order. The first rule that chooses a frame gets it."""

    def __init__(self, rules: Sequence[Rule], rank: int, peer: int) -> None:
        self._rules = [rule for rule in rules if rule.rank in (None, rank) and rule.peer in (None, peer)]
        self._seen = [0] * len(self._rules)
        self._chosen = [0] * len(self._rules)
        self._dice = [random.Random(f"{rule.seed}/{rank}/{peer}/{place}") for place, rule in enumerate(self._rules)]

    @property
    def faults(self) -> set[str]:
        """What may happen here."""
        return {rule.fault for rule in self._rules}

    def choose(self, header: Header) -> Rule | None:
        found = None
        for place, rule in enumerate(self._rules):
            if rule.concerns(header) and self._is_due(place, rule) and found is None:
                found = rule
                self._chosen[place] += 1
        return found

    def _is_due(self, place: int, rule: Rule) -> bool:
        self._seen[place] += 1
        number = self._seen[place] - rule.after
        if number < 1 or number % rule.every or (rule.count is not None and self._chosen[place] >= rule.count):
            return False
        return rule.chance == 1 or self._dice[place].random() < rule.chance


def parse_faults(text: str) -> tuple[Rule, ...]:
    """Rules from text; a ConfigError where it says something else."""
    return tuple(_parse_rule(part.strip()) for part in text.split(";") if part.strip())


def _parse_rule(text: str) -> Rule:
    fault, _, rest = text.partition(":")
    types = {field.name: str(field.type) for field in fields(Rule)}
    found: dict[str, Any] = {}
    for part in rest.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not name and not equals:
            continue
        if name not in types or name == "fault" or name in found:
            again = " a second time" if name in found else ""
            known = ", ".join(word for word in types if word != "fault")
            raise ConfigError("faults", f"{text!r} says {name!r}{again}; a fault has {known}")
        try:
            convert = int if types[name].startswith("int") else float if types[name] == "float" else str
            found[name] = convert(value)
        except ValueError as error:
            raise ConfigError("faults", f"{text!r} says {name}={value}, which is no number") from error
    return Rule(fault=fault.strip(), **found)
