"""How far a run's policy ends from those of on-policy training, in units of how far these end from one another.

    distance(run) = mean over on-policy seeds i ≠ the run's of D(on_i ‖ run) ÷ mean over ordered pairs i ≠ j of
    D(on_i ‖ on_j)

D is the divergence a token, over the whole vocabulary, on rollouts that on_i samples of questions that no step asked;
all policies are those behind the last step, so after equal numbers of updates, and in exact arithmetic. Claim 6 of the
abstract of Li, Zhou and Lan (2026) is about such a ratio; which divergence and which prefixes it means is our reading.
KL, and Jensen–Shannon beside it, which no token that a policy all but rules out can dominate.

Needs the trained models: `keep_models: true`. They are loaded one at a time; the log-probabilities of the on-policy
rollouts are held, one row of the vocabulary a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vexact.experiments.recipes import Job
from vexact.experiments.statistics import mean
from vexact.loop.questions import Questions
from vexact.model.checkpoint import load_weights
from vexact.model.config import ModelConfig
from vexact.model.parameters import stack
from vexact.model.policy import Policy, Scored
from vexact.model.tokenizer import load_tokenizer
from vexact.rollout.sampler import Sampler
from vexact.study.dose import kl, log_softmax
from vexact.tasks import load_task
from vexact_kernels import Kernels

Floats = NDArray[np.float64]
MODEL = "checkpoint"


@dataclass(frozen=True)
class Distance:
    """Both in units of the on-policy runs' own."""

    kl: float
    js: float


@dataclass(frozen=True)
class Reference:
    """An on-policy run: what it sampled anew, and its log-probabilities there, float64 [tokens, V]."""

    seed: int
    sequences: Sequence[Scored]
    logs: Floats
    at_once: int

    def to(self, other: Policy) -> tuple[float, float]:
        """KL(on-policy ‖ other) and their Jensen–Shannon divergence, a token."""
        return divergences(self.logs, rows(other, self.sequences, self.at_once))


def distances(on_policy: Sequence[Job], others: Sequence[Job], kernels: Kernels) -> dict[str, Distance]:
    """By digest, of all runs that left a model. on_policy: runs of the exact arm.

    Empty where fewer than two of those left one, or where they ended as one and the same.
    """
    references = [reference(job, kernels) for job in on_policy if left_model(job)]
    found: dict[str, list[tuple[float, float]]] = {}
    for job in {job.digest: job for job in (*on_policy, *others) if left_model(job)}.values():
        policy = trained(job, kernels)
        found[job.digest] = [each.to(policy) for each in references if each.seed != job.seed]
    own = [pair for job in on_policy for pair in found.get(job.digest, [])]
    units = [mean([pair[side] for pair in own]) for side in (0, 1)]
    if len(references) < 2 or not all(unit > 0.0 for unit in units):
        return {}
    return {
        digest: Distance(*(mean([pair[side] for pair in pairs]) / units[side] for side in (0, 1)))
        for digest, pairs in found.items()
        if pairs
    }


def reference(job: Job, kernels: Kernels) -> Reference:
    """What a run's trained policy samples of the questions that its next step would have asked."""
    recipe, policy = job.recipe, trained(job, kernels)
    tokenizer = load_tokenizer(job.folder / MODEL)
    questions = Questions(recipe, load_task(recipe.task, recipe.seed), tokenizer, policy.config)
    requests = questions.requests(recipe.steps, questions.items(recipe.steps))
    sequences = [rollout.scored for rollout in Sampler(policy).run(requests) if rollout.completion]
    at_once = recipe.optimizer.tokens_at_once
    return Reference(job.seed, sequences, rows(policy, sequences, at_once), at_once)


def trained(job: Job, kernels: Kernels) -> Policy:
    """The policy that a run ended with, in the dtype that it was computed in."""
    folder = job.folder / MODEL
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, config.dtype, lambda line: None)
    return Policy.build(config, lambda name: stack(config, weights, name), kernels, config.dtype)


def rows(policy: Policy, sequences: Sequence[Scored], at_once: int) -> Floats:
    """Log-probabilities float64 [tokens, V] of what the tokens of sequences were drawn from."""
    return np.concatenate(list(log_softmax(policy, sequences, at_once)))


def divergences(p: Floats, q: Floats) -> tuple[float, float]:
    """Mean over rows of KL(p ‖ q) and of the Jensen–Shannon divergence, nats. Log-probabilities float64 [tokens, V]."""
    middle = np.logaddexp(p, q) - math.log(2.0)
    halves = (kl(p, middle) + kl(q, middle)) / 2.0
    return mean(kl(p, q).tolist()), mean(halves.tolist())


def left_model(job: Job) -> bool:
    return (job.folder / MODEL / "config.json").is_file()
