"""Proof against one process: verify a plan on the user's own job, and compute a slice of a run again."""

from echelon.proof.verification import verify, verify_file

__all__ = ["verify", "verify_file"]
