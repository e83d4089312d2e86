"""Proof against one process: verify a plan on the user's own job, and compute a slice of a run again."""

from __future__ import annotations

from echelon.proof.replay_report import ReplayReport
from echelon.proof.replaying import replay
from echelon.proof.report import Report
from echelon.proof.verification import verify, verify_file

__all__ = ["ReplayReport", "Report", "replay", "verify", "verify_file"]
