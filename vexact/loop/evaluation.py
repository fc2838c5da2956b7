"""Held-out success of a policy: mean@n and pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vexact.loop.questions import Questions
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.rollout.request import Request
from vexact.tasks import Scoring

Sample = Callable[[Policy, Sequence[Request]], list[Rollout]]


@dataclass(frozen=True)
class Success:
    """Of one policy. n: completions of a question. successes: how many of them succeed, one count a question.

    tokens: completion tokens in all; truncated: completions that reached the limit; failed: whose reward failed.
    """

    n: int
    successes: Sequence[int]
    tokens: int
    truncated: int
    failed: int

    @property
    def mean(self) -> float:
        """mean@n: the share of all completions that succeed, unflipped."""
        return sum(self.successes) / (self.n * len(self.successes))

    def passed(self, k: int) -> float:
        """pass@k: the mean over questions of the unbiased estimate."""
        return math.fsum(pass_at(self.n, right, k) for right in self.successes) / len(self.successes)

    def metrics(self) -> dict[str, Any]:
        """By name. pass@k for the powers of two below n, and for n."""
        completions = self.n * len(self.successes)
        return {
            "success": self.mean,
            **{f"pass_at_{k}": self.passed(k) for k in sizes(self.n)},
            "length_mean": self.tokens / completions,
            "truncated": self.truncated / completions,
            "rewards_failed": self.failed,
        }


def pass_at(n: int, right: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k completions is right, from n of which `right`
    are: 1 − C(n − right, k) / C(n, k) (Codex, arXiv 2107.03374, eq. 1), exact but for one rounding.

    Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ right ≤ n.
    """
    if not (1 <= k <= n and 0 <= right <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {right} of {n} completions")
    return float(1 - Fraction(math.comb(n - right, k), math.comb(n, k)))


def sizes(n: int) -> list[int]:
    """2, 4, … below n, and n; none where it is 1, as pass@1 is mean@n."""
    return [k for k in (1 << i for i in range(1, n.bit_length())) if k < n] + ([n] if n > 1 else [])


def evaluate(policy: Policy, questions: Questions, scoring: Scoring, sample: Sample) -> Success:
    """sample: rollouts of requests, drawn with a policy. The same policy has the same success whenever it is asked."""
    items = questions.held_out()
    requests = questions.evaluation(items)
    asked = {request.id: item for request, item in zip(requests, items, strict=True)}
    rollouts = sample(policy, requests)
    scores = scoring.score(0, questions.answers(asked, rollouts))
    right = dict.fromkeys(asked, 0)
    for rollout, success in zip(rollouts, scores.successes, strict=True):
        right[rollout.request] += success
    return Success(
        n=questions.recipe.eval.n,
        successes=list(right.values()),
        tokens=sum(len(rollout.completion) for rollout in rollouts),
        truncated=sum(rollout.finish == "length" for rollout in rollouts),
        failed=scores.raised + scores.not_finite + scores.timed_out,
    )
