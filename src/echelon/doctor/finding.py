"""One thing that was looked at: what is there, and what to do if that is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`needed` says that training cannot run while this is missing; `advice` is what to do about it."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    needed: bool = False


def ok(name: str, detail: str) -> Finding:
    return Finding(name=name, status="ok", detail=detail)


def warning(name: str, detail: str, advice: str) -> Finding:
    return Finding(name=name, status="warning", detail=detail, advice=advice)


def missing(name: str, detail: str, advice: str, *, needed: bool = False) -> Finding:
    return Finding(name=name, status="missing", detail=detail, advice=advice, needed=needed)


def can_train(findings: Sequence[Finding]) -> bool:
    return not any(finding.needed and finding.status == "missing" for finding in findings)


def line(finding: Finding) -> str:
    """One finding as text; advice on a line of its own."""
    first = f"{finding.status:<8} {finding.name:<12} {finding.detail}".rstrip()
    return first if not finding.advice else f"{first}\n{'':<21} -> {finding.advice}"


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    if not can_train(findings):
        broken = ", ".join(finding.name for finding in findings if finding.needed and finding.status == "missing")
        return f"training cannot run here yet: {broken}"
    warnings = sum(finding.status == "warning" for finding in findings)
    return "ready to train" + (f" ({warnings} warning{'' if warnings == 1 else 's'} above)" if warnings else "")


def to_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"ok": can_train(findings), "findings": [asdict(finding) for finding in findings]}
