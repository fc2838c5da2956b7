"""How large noise must be for a wanted dose: solved once, on frozen prefixes, by the divergence it causes there.

The dose is the K3 of sampled tokens, whose mean is KL(q ‖ p), q with noise and p without. Its estimate from samples
needs several times as many positions as the sum over the vocabulary does, so that is what is solved for, on prefixes
that the exact policy sampled; K3 of newly sampled rollouts confirms it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout

Floats = NDArray[np.float64]
CLOSE, ACCEPTED = 0.01, 0.1  # relative, to the wanted dose
TRIES = 40
POSITIONS, VALUES = 1024, 1 << 24  # fewest frozen positions where there are as many; logits that are cheap
FIRST, SMALLEST, LARGEST = 0.1, 1e-6, 1e4


class DoseError(BadInput):
    """No size of this noise causes the wanted dose."""


@dataclass(frozen=True)
class Dose:
    """sigma: of the noise; divergence: the KL per token in nats that it causes on `positions` frozen prefixes."""

    sigma: float
    divergence: float
    positions: int


def solve(target: float, divergence: Callable[[float], float], positions: int) -> Dose:
    """The σ whose divergence is the target within 1 %: by KL ∝ σ² from both sides, then by bisection in log σ.

    σ has four digits: the last bits of a machine's exponentials, which are in a divergence, do not reach it. Where
    numbers of 16 bits make the divergence jump past it, the nearest that was met, within 10 %. Raises DoseError
    where no σ between 1e-6 and 1e4 gives that.
    """
    sigma, low, high = FIRST, SMALLEST, LARGEST
    nearest = Dose(0.0, 0.0, positions)
    for _ in range(TRIES):
        sigma = float(f"{sigma:.3e}")
        dose = Dose(sigma, divergence(sigma), positions)
        if abs(dose.divergence - target) < abs(nearest.divergence - target):
            nearest = dose
        if abs(dose.divergence - target) <= CLOSE * target:
            return dose
        low, high = (sigma, high) if dose.divergence < target else (low, sigma)
        step = sigma * math.sqrt(target / dose.divergence) if dose.divergence > 0.0 else high
        sigma = step if low < step < high else math.sqrt(low * high)
        if high / low < 1.0 + CLOSE**3:
            break
    if abs(nearest.divergence - target) <= ACCEPTED * target:
        return nearest
    raise DoseError(
        f"mismatch: no sigma between {SMALLEST:g} and {LARGEST:g} gives K3 {target:g}; the nearest is "
        f"{nearest.divergence:.3g}, at {nearest.sigma:.6g}"
    )


class Frozen:
    """Prefixes that an exact policy sampled, and its distributions there.

    Of many sequences so many are kept, from the first on, that `POSITIONS` tokens are scored, and more where a small
    vocabulary makes them cheap.
    """

    def __init__(self, policy: Policy, sequences: Sequence[Scored], tokens_at_once: int) -> None:
        wanted = max(POSITIONS, VALUES // policy.config.vocab_size)
        rows = list(accumulate(sequence.rows for sequence in sequences))
        self.sequences = sequences[: 1 + sum(count < wanted for count in rows)]
        self.positions = sum(sequence.rows for sequence in self.sequences)
        self._policy, self._at_once = policy, tokens_at_once
        self._states = list(policy.states(self.sequences, tokens_at_once))
        self._clean = list(_logs(self._logits(policy), self.sequences))

    def divergence(self, sampler: Policy, trainer: Policy | None = None, *, same_states: bool = False) -> float:
        """Mean over scored tokens of KL(sampler ‖ trainer) over the vocabulary, in nats, at each token's temperature.

        trainer: by default the exact policy. same_states: only logits are disturbed, so that no forward is needed.
        """
        sides = (self._distributions(policy or self._policy, same_states) for policy in (sampler, trainer))
        rows = [kl(q, p) for q, p in zip(*sides, strict=True)]
        return math.fsum(value for row in rows for value in row.tolist()) / self.positions

    def _distributions(self, policy: Policy, same_states: bool) -> Iterable[Floats]:
        if policy is self._policy:
            return self._clean
        logits = self._logits(policy) if same_states else policy.logits(self.sequences, self._at_once)
        return _logs(logits, self.sequences)

    def _logits(self, policy: Policy) -> Iterator[Tensor]:
        for states in self._states:
            yield from states.logits(policy)


def sampled_k3(rollouts: Sequence[Rollout], policy: Policy, tokens_at_once: int) -> float:
    """K3 of recorded log-probabilities against those of the policy: the mean of r − 1 − log r."""
    chosen = [rollout for rollout in rollouts if rollout.completion]
    scored = _float64(policy.logprobs([rollout.scored for rollout in chosen], tokens_at_once).logprob)
    delta = scored - np.concatenate([_float64(rollout.logprobs) for rollout in chosen])
    return math.fsum(np.expm1(delta) - delta) / len(delta)


def kl(q: Floats, p: Floats) -> Floats:
    """KL(q ‖ p) of each row from log-probabilities [R, V], as the sum of p − q − q·δ with δ = log p − log q: its terms
    are not negative, and none loses digits where q and p are close."""
    never = np.isneginf(q)
    safe = np.where(never, 0.0, q)
    delta = np.where(never, 0.0, p - safe)
    terms = np.where(never, np.exp(p), np.exp(safe) * (np.expm1(delta) - delta))
    values: Floats = terms.sum(axis=1)
    return values


def log_softmax(policy: Policy, sequences: Sequence[Scored], tokens_at_once: int) -> Iterator[Floats]:
    """Log-probabilities float64 [R, V] of the distributions that scored tokens come from."""
    return _logs(policy.logits(sequences, tokens_at_once), sequences)


def _logs(parts: Iterable[Tensor], sequences: Sequence[Scored]) -> Iterator[Floats]:
    temperatures = np.array([each.temperature or 1.0 for each in sequences for _ in range(each.rows)])
    row = 0
    for logits in parts:
        scaled = _float64(logits) / temperatures[row : row + len(logits), None]
        row += len(logits)
        top = scaled.max(axis=1, keepdims=True)
        yield scaled - top - np.log(np.exp(scaled - top).sum(axis=1, keepdims=True))


def _float64(x: Tensor) -> Floats:
    return x.detach().cpu().numpy().astype(np.float64)
