"""The reinforcement learning loop: sample, score, train, publish."""

from vexact.loop.folder import RunError
from vexact.loop.loop import RunResult, train

__all__ = ["RunError", "RunResult", "train"]
