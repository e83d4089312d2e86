"""From the text of a plan to the fields of one: reads term by term and says of a wrong one what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from echelon.errors import ConfigError
from echelon.plan.parts import (
    CODECS,
    FRACTIONS,
    SCHEDULES,
    TOPOLOGIES,
    ZERO_STAGES,
    Agreement,
    Codec,
    Served,
    listed,
    no_pipeline,
)

AXES = ("dp", "tp", "pp")
SERVER_OPTIONS = ("servers", "replicas", "tiers", "groups", "reads")
LONGEST_PLAN = 400

# Terms that are one word: the row of the table each stands in, and the field it sets.
WORDS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {word: ("ZeRO stage", {"zero": stage}) for stage, word in enumerate(ZERO_STAGES, 1)}
    | {word: ("pipeline schedule", {"schedule": word}) for word in SCHEDULES}
    | {word: ("topology", {"topology": word}) for word in TOPOLOGIES}
    | {word: ("agreement", {"agreement": Agreement(rule=word)}) for word in ("sync", "async")}
    | {word: ("codec", {"codec": Codec(name=word)}) for word in CODECS if word not in {*FRACTIONS, "lowrank"}}
    | {"ps": ("parameter server", {"server": Served()}), "zstd": ("zstd", {"zstd": True})}
)

# Terms that take something after a colon, and how each is written.
USAGE: Mapping[str, str] = MappingProxyType(
    {
        "ps": "write ps, or with options e.g. ps:servers=2,replicas=2",
        "bounded": "write bounded:K, how many steps a read may miss, e.g. bounded:4",
        "local": "write local:H, the local steps between agreements, e.g. local:50 or local:50,sites=2",
        "topk": "write topk:F, the fraction of the entries to send, e.g. topk:0.01",
        "randk": "write randk:F, the fraction of the entries to send, e.g. randk:0.01",
        "lowrank": "write lowrank:R, the rank of the two factors, e.g. lowrank:2",
    }
)

# Every term as it is written, in the table's order.
TERMS = (
    *("dp", "tp2", "pp2", *ZERO_STAGES, *SCHEDULES, *TOPOLOGIES, "ps", "sync", "async", "bounded:4", "local:50"),
    *("fp16", "bf16", "int8", "int4", "sign", "topk:0.01", "randk:0.01", "lowrank:2", "adapt", "zstd"),
)

# What the same thing is called elsewhere.
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "fsdp": "zero3",
        "fsdp2": "zero3",
        "zero": "zero1, zero2 or zero3",
        "allreduce": "ring, tree, star or hier",
        "hierarchical": "hier",
        "parameterserver": "ps",
        "ssp": "ps+bounded:4",
        "diloco": "local:50",
        "localsgd": "local:50",
        "powersgd": "lowrank:2",
        "onebit": "sign",
        "1bit": "sign",
        "zb": "zerobubble",
        "data": "dp",
        "tensor": "tp2",
        "pipeline": "pp2",
    }
)

_AXIS = re.compile(r"(?:d(?=dp))?(dp|tp|pp)([0-9]*)")
_WHOLE_AXIS = re.compile(r"d?dp|(ddp|dp|tp|pp)[1-9][0-9]{0,8}")
_MESH = re.compile(r"(ddp|dp|tp|pp)(?![a-z])")
_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")
_DECIMAL = re.compile(r"([0-9]{1,20}(\.[0-9]{0,400})?|\.[0-9]{1,400})(e-?[0-9]{1,3})?")


def read_plan(text: str) -> dict[str, Any]:
    """The fields of the plan that `text` says; what it does not say is left out."""
    if not isinstance(text, str):
        raise ConfigError("plan", f"is a line of text such as dp4+zero1 or an echelon.Plan, not {type(text).__name__}")
    text = text.strip()
    if not text:
        raise ConfigError("plan", "is empty; write dp for plain data parallel training")
    if len(text) > LONGEST_PLAN:
        raise ConfigError(f"{text[:20]}...", f"a plan is at most {LONGEST_PLAN} characters long")
    fields: dict[str, Any] = {}
    rows: dict[str, str] = {}
    for term in text.split("+"):
        row, found = _read_term(term)
        if row in rows:
            raise ConfigError(term, _twice(term, rows[row], row))
        rows[row] = term
        fields |= found
    # Said without a pipeline, 1f1b is as wrong as any other; as the field's default it is not.
    if "schedule" in fields and fields.get("pp", 1) == 1:
        raise ConfigError(fields["schedule"], no_pipeline(fields["schedule"]))
    return fields


def _read_term(term: str) -> tuple[str, dict[str, Any]]:
    """The row of the table that a term stands in, and the fields it sets."""
    if not term:
        raise ConfigError("+", "joins two terms and one of them is missing; write e.g. dp4+zero1")
    known = _read_known(term)
    if known is None:
        raise ConfigError(term, _unknown(term))
    return known


def _read_known(term: str) -> tuple[str, dict[str, Any]] | None:
    if _MESH.match(term):
        return "mesh", _read_mesh(term)
    if term in WORDS:
        return WORDS[term]
    head, colon, tail = term.partition(":")
    if head in USAGE and not tail:
        raise ConfigError(term, f"something is missing after {head}; {USAGE[head]}")
    match head:
        case "ps":
            return "parameter server", {"server": _read_server(tail)}
        case "bounded" | "local":
            return "agreement", {"agreement": _read_agreement(term, head, tail)}
        case "topk" | "randk":
            return "codec", {"codec": _read_codec(term, head, _fraction(term, tail))}
        case "lowrank":
            return "codec", {"codec": _read_codec(term, head, _whole(term, tail, USAGE[head]))}
    if colon and head in WORDS:
        raise ConfigError(term, f"{head} takes nothing after it; write {head}")
    return None


def _read_mesh(term: str) -> dict[str, Any]:
    sizes: dict[str, int | None] = {}
    for part in term.split("."):
        match = _AXIS.fullmatch(part)
        if not match:
            raise ConfigError(part or term, _no_axis(part, term))
        axis, number = match.groups()
        if axis in sizes:
            raise ConfigError(part, f"the mesh {term} has a {axis} axis already; name each axis once")
        if not number and axis != "dp":
            raise ConfigError(part, f"needs the number of workers to split over, e.g. {axis}2")
        sizes[axis] = _whole(part, number, f"write e.g. {axis}2") if number else None
    # A mesh that names axes is the whole mesh: without dp it has one replica.
    return {"dp": 1} | sizes


def _read_server(tail: str) -> Served:
    found: dict[str, Any] = {}
    for option in tail.split(","):
        name, _, value = option.partition("=")
        if name not in SERVER_OPTIONS:
            near = difflib.get_close_matches(name, SERVER_OPTIONS, 1)
            hint = f"did you mean {near[0]}={value or 2}?" if near else "write e.g. ps:servers=2"
            raise ConfigError(f"ps:{option}", f"the options of ps are {listed(SERVER_OPTIONS)}; {hint}")
        if name in found:
            raise ConfigError(f"ps:{option}", f"{name} is said twice; say it once")
        found[name] = value if name == "reads" else _whole(f"ps:{option}", value, f"write e.g. {name}=2")
    return Served(**found)


def _read_agreement(term: str, rule: str, tail: str) -> Agreement:
    steps, comma, option = tail.partition(",")
    number = _whole(term, steps, USAGE[rule])
    if not comma:
        return Agreement(rule=rule, steps=number)
    name, _, value = option.partition("=")
    if rule != "local" or name != "sites":
        raise ConfigError(term, f"{option!r} is no option of {rule}; {USAGE[rule]}")
    return Agreement(rule=rule, steps=number, sites=_whole(term, value, USAGE[rule]))


def _read_codec(term: str, name: str, amount: float) -> Codec:
    try:
        return Codec(name=name, amount=amount)
    except ConfigError as error:  # with the number as it was written
        raise ConfigError(term, error.why) from None


def _whole(term: str, text: str, usage: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ConfigError(
            term, f"{text[:20]!r} is no whole number; {usage}" if text else f"a number is missing; {usage}"
        )
    return int(text)


def _fraction(term: str, text: str) -> float:
    if not _DECIMAL.fullmatch(text):
        raise ConfigError(term, f"{text[:20]!r} is no fraction; {USAGE[term.partition(':')[0]]}")
    return float(text)


def _twice(term: str, earlier: str, row: str) -> str:
    if term == earlier:
        return "is said twice; say it once"
    if row == "mesh":
        return f"the mesh is {earlier} already; axes are joined by dots, e.g. dp2.tp2"
    return f"the {row} is {earlier} already; choose one of the two"


def _no_axis(part: str, mesh: str) -> str:
    """What to write instead of a part of the mesh that is no axis."""
    if not part:
        return f"an axis is missing beside a dot in {mesh}; write e.g. dp2.tp2"
    if _MESH.match(part):
        return f"an axis is its name and a whole number; {_respelled(part) or 'write e.g. dp2.tp2'}"
    if _reads(part):
        return f"is no mesh axis; a plus joins it to the mesh, e.g. dp2+{part}"
    return f"is no mesh axis; the axes are {listed(AXES)}, joined by dots, e.g. dp2.tp2"


def _unknown(term: str) -> str:
    """What to write instead of a word that is no term."""
    if any(character.isspace() for character in term):
        return "a plan is one word without blanks, e.g. dp4+zero1"
    plain = re.sub(r"[-_=:]", "", term).lower()
    if plain in ELSEWHERE:
        return f"is called {ELSEWHERE[plain]} here"
    respelled = _respelled(term)
    if respelled:
        return respelled
    parts = re.split(r"[.,;/&x*]", term)
    if len(parts) > 1 and all(parts) and any(_reads(part) for part in parts):
        return "axes are joined by dots and all else by plus signs, e.g. dp2.tp2+zero1"
    written = {example.partition(":")[0]: example for example in TERMS}
    near = difflib.get_close_matches(plain, written, 3, 0.75) or difflib.get_close_matches(plain, written, 1, 0.55)
    if near:
        return f"there is no such term; did you mean {' or '.join(written[name] for name in near)}?"
    return f"there is no such term; there are {listed(TERMS)}"


def _respelled(term: str) -> str:
    """The same letters and numbers as the language writes them: `Zero-1` is zero1, `bounded=4` is bounded:4."""
    plain = re.sub(r"[-_=:]", "", term).lower()
    letters = re.sub(r"[^a-z].*", "", plain)
    for candidate in (plain, f"{letters}:{plain.removeprefix(letters)}"):
        if candidate != term and _reads(candidate):
            return f"did you mean {candidate}?"
    return ""


def _reads(term: str) -> bool:
    # Only words that can be read without a hint about another one, so that hints never go in circles.
    if _MESH.match(term):
        return all(_WHOLE_AXIS.fullmatch(part) for part in term.split("."))
    try:
        return _read_known(term) is not None
    except ConfigError:
        return False
