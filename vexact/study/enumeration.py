"""E2x: what a remedy does in the mean, exactly. All sequences of a small policy are enumerated; nothing is sampled.

A softmax policy has logits z_h of its own at every prefix h of V tokens and up to T − 1 of them, so a gradient is one
number for each (prefix, token). Three policies: θ, the trainer; θ_s, the weights that sampled, in the trainer's
arithmetic; and the sampler, whose logits at θ_s may be disturbed. For a reward R of whole sequences

    trainer's gradient    Σ_y p(y) (R − b) Σ_t (1_{y_t} − p_{h_t})       no b changes it
    sampler's gradient    Σ_y q(y) (R − b) Σ_t (1_{y_t} − q_{h_t})
    of a remedy           Σ_y q(y) (R − b) Σ_t v_t [w_a (1_a − p) − (q∘w − (Σ_v q_v w_v) p)]      centred
                          Σ_y q(y) (R − b) Σ_t v_t (1_a − p)                                       else

with v the weights that the remedy gives itself, 0 where it rejects, and w those that it centres with. A token's loss is
not divided by anything here. float64, but for the remedy's own weights, which are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from vexact.arithmetic import Floats, exp, log
from vexact.model.remedy import Centring, Ratios, Remedy
from vexact_kernels import Kernels


@dataclass(frozen=True)
class World:
    """All sequences of `length` tokens out of `vocabulary`, and rewards of them, float64 [sequences]."""

    rewards: Floats
    vocabulary: int = 6
    length: int = 4

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """[sequences, length], in the order of the numbers that they spell."""
        count = self.vocabulary**self.length
        powers = self.vocabulary ** np.arange(self.length - 1, -1, -1)
        return np.arange(count)[:, None] // powers % self.vocabulary

    @cached_property
    def prefixes(self) -> NDArray[np.int64]:
        """[sequences, length]: the number of the prefix before each token; the empty one is 0."""
        found = np.zeros_like(self.sequences)
        for at in range(1, self.length):
            found[:, at] = found[:, at - 1] * self.vocabulary + self.sequences[:, at - 1] + 1
        return found

    @property
    def prefix_count(self) -> int:
        return int((self.vocabulary**self.length - 1) // (self.vocabulary - 1))

    def columns(self, table: Floats) -> Floats:
        """Of every token of every sequence its entry of a table [prefixes, V]: [sequences, length]."""
        return table[self.prefixes, self.sequences]

    def gathered(self, values: Floats) -> Floats:
        """Values of tokens [sequences, length] added up for each (prefix, token): [prefixes, V]."""
        found = np.zeros((self.prefix_count, self.vocabulary))
        np.add.at(found, (self.prefixes, self.sequences), values)
        return found


@dataclass(frozen=True)
class Three:
    """Logits [prefixes, V] of the trainer, of the weights that sampled, and of the sampler at them.

    old: of π_old, the trainer at the start of the step; by default, and in the first update of a step, the trainer's.
    """

    trainer: Floats
    source: Floats
    sampler: Floats
    old: Floats | None = None

    @staticmethod
    def drawn(world: World, seed: int, lag: float = 0.0, noise: float = 0.0) -> Three:
        """Normal logits; a step away from θ_s and a disturbance of the sampler, normal too, of those sizes."""
        generator = np.random.default_rng(seed)
        shape = (world.prefix_count, world.vocabulary)
        source, step, tilt = (generator.normal(size=shape) for _ in range(3))
        return Three(source + lag * step, source, source + noise * tilt)


def log_softmax(logits: Floats) -> Floats:
    """Over the last dimension."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - log(exp(shifted).sum(-1, keepdims=True))


def policy_gradient(world: World, logits: Floats, baseline: float = 0.0) -> Floats:
    """Of the expected reward of that policy, by its own logits: [prefixes, V]."""
    logp = log_softmax(logits)
    chance = exp(world.columns(logp).sum(1))
    return _score(world.gathered(_tokens(world, chance * (world.rewards - baseline))), exp(logp))


def expected_update(world: World, three: Three, remedy: Remedy, kernels: Kernels, baseline: float = 0.0) -> Floats:
    """The mean over the sampler's sequences of what the remedy makes of REINFORCE, by the trainer's logits."""
    p, s, q = (log_softmax(logits) for logits in (three.trainer, three.source, three.sampler))
    gains = world.rewards - baseline
    given = remedy_weights(world, three, remedy, kernels, baseline)
    mass = _tokens(world, exp(world.columns(q).sum(1)) * gains) * given
    if remedy.centre is None:
        return _score(world.gathered(mass), exp(p))
    total = np.zeros_like(p)
    for sign in (1.0, -1.0):
        share = world.gathered(np.where(_tokens(world, np.sign(gains)) == sign, mass, 0.0))
        w = centre_weights(remedy.centre, {"none": p, "lag": s, "sampler": q}[remedy.centre.base], p, sign)
        mean = (exp(q) * w).sum(1, keepdims=True)
        centred = exp(q) * w - mean * exp(p)
        total += _score(share * w, exp(p)) - share.sum(1, keepdims=True) * centred
    return total


def remedy_weights(world: World, three: Three, remedy: Remedy, kernels: Kernels, baseline: float = 0.0) -> Floats:
    """What the remedy itself answers for every token, 0 where it rejects: float64 [sequences, length]."""
    begun = three.trainer if three.old is None else three.old
    p, s, q, old = (world.columns(log_softmax(z)) for z in (three.trainer, three.source, three.sampler, begun))
    cuts = [slice(at, at + world.length) for at in range(0, p.size, world.length)]
    column = lambda values: torch.tensor(values.reshape(-1), dtype=torch.float32)  # noqa: E731
    ratios = Ratios(column(old - q), column(p - q), cuts, kernels, column(p - s), column(q), column(p - old))
    gains = column(_tokens(world, world.rewards - baseline))
    found = remedy.weights(ratios, torch.ones(p.size, dtype=torch.bool), gains)
    kept = torch.where(found.kept, found.weights, 0.0)
    return kept.numpy().astype(np.float64).reshape(p.shape)


def centre_weights(centring: Centring, base: Floats, policy: Floats, sign: float) -> Floats:
    """w of every (prefix, token) where the advantage has that sign. base, policy: log-probabilities."""
    ratio = exp(policy - base)
    if centring.base == "none" or centring.clip == "none":
        return ratio
    if centring.clip == "truncate":
        return np.clip(ratio, centring.low, centring.high)
    outside = ratio > centring.high if sign > 0 else ratio < centring.low
    return np.where(outside, 0.0, ratio)


def biases(
    world: World, three: Three, remedies: Mapping[str, Remedy], kernels: Kernels
) -> dict[str, tuple[float, float]]:
    """Of each remedy the distance of its mean update from the trainer's gradient, and from the sampler's, each as a
    share of that gradient's length."""
    truths = [policy_gradient(world, logits) for logits in (three.trainer, three.sampler)]
    found = {}
    for name, remedy in remedies.items():
        update = expected_update(world, three, remedy, kernels)
        to_trainer, to_sampler = (float(np.linalg.norm(update - g) / np.linalg.norm(g)) for g in truths)
        found[name] = (to_trainer, to_sampler)
    return found


def _tokens(world: World, sequences: Floats) -> Floats:
    """The value of its sequence for each token."""
    return np.repeat(sequences[:, None], world.length, axis=1)


def _score(share: Floats, p: Floats) -> Floats:
    """Σ_a share_a (1_a − p) at every prefix."""
    return share - share.sum(1, keepdims=True) * p
