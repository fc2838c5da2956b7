"""What ranks share of a loop's work beside the trainer's: sampling is split, and one rank scores for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.recipe import TaskSection
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.tasks import Answer, Scores, Scoring, Task


class SharedScoring(Scoring):
    """Rank 0 calls the reward function, since that may be slow, at a limit, or not the same twice."""

    def __init__(self, task: Task, section: TaskSection, seed: int, ranks: Ranks) -> None:
        super().__init__(task, section, seed)
        self._ranks = ranks

    def score(self, step: int, answers: Sequence[Answer]) -> Scores:
        """As `Scoring.score`, the same on every rank. Raises RankError where rank 0's failed."""
        return self._ranks.from_first(lambda: super(SharedScoring, self).score(step, answers))


def sample_shared(
    sampler: Sampler, requests: Sequence[Request], ranks: Ranks, progress: Callable[[int], None] | None = None
) -> list[Rollout]:
    """All rollouts of the requests on every rank, in order of their ids. progress hears of this rank's own.

    Who samples a request changes nothing: a draw is addressed by its request, sample and position.
    """
    mine = sampler.run(ranks.part(requests), progress)
    return sorted(ranks.joined(mine), key=lambda rollout: rollout.id)
