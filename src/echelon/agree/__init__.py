"""Local gradients in, one agreed update out: the same on every worker, or none anywhere."""

from echelon.agree.outcome import Again, Agreement, Applied, Outcome, Skipped
from echelon.agree.replicated import Replicated
from echelon.agree.update import Update

__all__ = ["Again", "Agreement", "Applied", "Outcome", "Replicated", "Skipped", "Update"]
