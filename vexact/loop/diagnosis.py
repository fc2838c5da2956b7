"""What mismatch does to the gradient of a step, against gradients that only an exact engine can take.

Of one batch of rollouts, and with REINFORCE's gradient g = mean over tokens of A·s_a, s the score of p_θ as the trainer
computes it:

- **drift**: mean of A·s̄ with s̄ = Σ_v q_v s_v, which is 0 where the sampler's q is p_θ: what the sampler's side adds
  whatever the rewards say. Taken as g less the centred gradient, mean of A·(s_a − s̄). Beside its norm the cosine
  between it and g.
- **gradient_cosine, gradient_bias**: g, with what disturbs finished gradients, against the same of the exact policy on
  the same batch, and |g − exact| over |exact|. Exactly 1 and 0 where the trainer's side is exact.
- **noise_projection**: how far the step moved the weights along the noise that the sampler's have, Σ Δθ·δW / |δW|.

- **truth_cosine**: g against the gradient of a fresh batch many times as large, sampled and scored by the exact policy;
  beside it truth_split_cosine, of the two halves of that batch: what sampling alone leaves between two estimates.

Two or three gradient passes more, so only every so many steps. Nothing of it is on the way to a weight: sums of
products are float64, correctly rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vexact.model.centring import Centres
from vexact.model.gradients import Gradients
from vexact.model.law import Laws
from vexact.model.policy import Policy, Scored
from vexact.model.remedy import Centring
from vexact.model.rollout import Rollout
from vexact.study.mismatch import Mismatch
from vexact.training.admission import Source
from vexact.training.trainer import Trainer

Stacks = Mapping[str, Tensor]


class Diagnosis:
    """Of one step, in one process. mismatch: says along which direction the sampler's weights are off. fresh: rollouts
    and advantages of the large batch, none where no such batch is wanted.
    """

    def __init__(
        self, trainer: Trainer, mismatch: Mismatch, fresh: Callable[[], tuple[Sequence[Rollout], Tensor]]
    ) -> None:
        self.trainer, self.mismatch, self.fresh = trainer, mismatch, fresh
        self._masters: dict[str, Tensor] = {}

    def before(self, rollouts: Sequence[Rollout], advantages: Tensor, source: Source) -> dict[str, float]:
        """Measures of the batch, by name. advantages: float32 [rollouts]."""
        self._masters = {name: master.clone() for name, master in self.trainer.optimizer.masters.items()}
        batch = Batch.of(rollouts, advantages)
        if batch is None:
            return {}
        found, plain = diagnose(self.trainer, batch, source)
        large = Batch.of(*self.fresh())
        return found if large is None else {**found, **compare(self.trainer, plain, large)}

    def after(self, sampled_from: Policy, step: int) -> dict[str, float]:
        """Measures of what the step did; none where the weights are not what is disturbed."""
        direction = self.mismatch.direction(sampled_from, step)
        if direction is None:
            return {}
        masters = self.trainer.optimizer.masters
        return {"noise_projection": projection(self._masters, masters, direction)}


@dataclass(frozen=True)
class Batch:
    """Whole rollouts that can be trained, ids ascending. weights: of each token, −A over their number: float32. laws:
    what they were drawn from, where they kept it."""

    sequences: Sequence[Scored]
    weights: Tensor
    laws: Laws = field(default_factory=dict)

    @staticmethod
    def of(rollouts: Sequence[Rollout], advantages: Tensor) -> Batch | None:
        """advantages: float32 [rollouts]. None where nothing is left."""
        pairs = sorted(
            (
                (rollout, advantage)
                for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True)
                if rollout.completion and rollout.finish != "nonfinite"
            ),
            key=lambda pair: pair[0].id,
        )
        if not pairs:
            return None
        tokens = sum(len(rollout.completion) for rollout, _ in pairs)
        weights = [torch.full((len(rollout.completion),), -advantage / tokens) for rollout, advantage in pairs]
        laws = {rollout.id: rollout.law for rollout, _ in pairs if rollout.law is not None}
        return Batch([rollout.scored for rollout, _ in pairs], torch.cat(weights), laws)

    def halves(self) -> tuple[Batch, Batch]:
        """The first and the second half of the rollouts, whole groups where their number is even."""
        middle = len(self.sequences) // 2
        tokens = sum(sequence.rows for sequence in self.sequences[:middle])
        first = Batch(self.sequences[:middle], self.weights[:tokens])
        return first, Batch(self.sequences[middle:], self.weights[tokens:])


def diagnose(trainer: Trainer, batch: Batch, source: Source) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Measures by name, before the step's first update, and the plain gradient by stack."""
    sequences, weights = batch.sequences, batch.weights
    seen, at_once = trainer.view(trainer.policy), trainer.section.tokens_at_once
    plain = gradient(seen, sequences, weights, at_once)
    centred = gradient(seen, sequences, weights, at_once, Centres(Centring(), source.sampler, laws=batch.laws))
    drift = {name: plain[name].double() - centred[name].double() for name in plain}
    found = {
        "drift_norm": norm(drift),
        "drift_cosine": cosine(drift, plain),
        "reinforce_norm": norm(plain),
        "gradient_cosine": 1.0,
        "gradient_bias": 0.0,
    }
    used = trainer.disturb(plain)
    if seen is not trainer.policy or any(used[name] is not plain[name] for name in plain):
        exact = plain if seen is trainer.policy else gradient(trainer.policy, sequences, weights, at_once)
        apart = {name: used[name].double() - exact[name].double() for name in used}
        found["gradient_cosine"] = cosine(used, exact)
        found["gradient_bias"] = _ratio(norm(apart), norm(exact))
    return found, plain


def compare(trainer: Trainer, plain: Stacks, large: Batch) -> dict[str, float]:
    """A step's gradient beside that of the large batch, which is the sum of its halves'."""
    at_once = trainer.section.tokens_at_once
    one, other = (gradient(trainer.policy, half.sequences, half.weights, at_once) for half in large.halves())
    both = {name: one[name].double() + other[name].double() for name in one}
    return {
        "truth_cosine": cosine(plain, both),
        "truth_split_cosine": cosine(one, other),
        "truth_sequences": len(large.sequences),
    }


def gradient(
    policy: Policy, sequences: Sequence[Scored], weights: Tensor, at_once: int, centres: Centres | None = None
) -> dict[str, Tensor]:
    """Of Σ weight·log p over scored tokens, float32 by stack. weights: float32 [tokens] on the host."""
    sums = Gradients(policy.config, policy.ops.kernels)
    for rows, found in policy.gradient_passes(sequences, sums, at_once, centres=centres):
        found.logprob.backward(weights[rows].to(policy.device))
    return sums.totals()


def projection(before: Stacks, after: Stacks, direction: Stacks) -> float:
    """How far the weights moved along a direction, in units of the weights."""
    moved = {name: after[name].double() - before[name].double() for name in direction}
    return _ratio(dot(moved, direction), norm(direction))


def dot(a: Stacks, b: Stacks) -> float:
    """Over all elements of all stacks, float64."""
    return math.fsum(float((a[name].double() * b[name].double()).sum()) for name in a)


def norm(a: Stacks) -> float:
    return math.sqrt(dot(a, a))


def cosine(a: Stacks, b: Stacks) -> float:
    """0 where either has no length."""
    return _ratio(dot(a, b), norm(a) * norm(b))


def _ratio(value: float, unit: float) -> float:
    return value / unit if unit > 0.0 else 0.0
