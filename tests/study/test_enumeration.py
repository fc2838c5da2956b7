"""E2x: what every remedy does in the mean, over all sequences of a small policy, without a single seed of sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vexact.model.centring import Centre as Backward
from vexact.model.law import Law
from vexact.model.remedy import Centring, Plain, Remedy
from vexact.study.enumeration import (
    Three,
    World,
    biases,
    expected_update,
    log_softmax,
    policy_gradient,
    remedy_weights,
)
from vexact.study.remedies import (
    CIS,
    DPPO,
    Centre,
    IcePop,
    NegativesMask,
    RatioWeight,
    SequenceMask,
    SequenceRejection,
    SequenceTIS,
    Together,
    TokenRejection,
    TokenTIS,
)
from vexact_kernels import Softmax, load

KERNELS = load()
WORLD = World(np.random.default_rng(0).normal(size=6**4) + 0.5)
NOISE, LAG = Three.drawn(WORLD, 1, noise=0.3), Three.drawn(WORLD, 2, lag=0.3)
BOTH, EXACT = Three.drawn(WORLD, 3, noise=0.3, lag=0.3), Three.drawn(WORLD, 4)
NONE, SEQUENCE_IS, TOKEN_IS = Plain(), SequenceTIS(3.4e38), TokenTIS(3.4028e38)
SCORES, DLC = Centre(Centring()), Centre(Centring("lag"))
Array = NDArray[Any]


def distance(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def k3(x: Array) -> Array:
    return np.expm1(x) - x


def two_outcomes(p: Array, q: Array) -> Array:
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


# Every remedy that weighs, beside its formula in float64: of log r, ℓ (as log), log q and A, each [sequences, T].
FORMULAS: dict[str, tuple[Remedy, Callable[[Array, Array, Array, Array], Array]]] = {
    "none": (NONE, lambda r, lag, q, a: np.ones_like(r)),
    "token TIS": (TokenTIS(1.2), lambda r, lag, q, a: np.minimum(np.exp(r), 1.2)),
    "token IS": (TOKEN_IS, lambda r, lag, q, a: np.exp(r)),
    "sequence IS": (SEQUENCE_IS, lambda r, lag, q, a: np.exp(over(r, np.sum))),
    "sequence TIS": (SequenceTIS(1.5), lambda r, lag, q, a: np.minimum(np.exp(over(r, np.sum)), 1.5)),
    "token rejection": (TokenRejection(0.8, 1.25), lambda r, lag, q, a: 1.0 * (np.abs(r) <= np.log(1.25))),
    "token rejection, k3": (TokenRejection(0.0, 0.02, "k3"), lambda r, lag, q, a: 1.0 * (k3(r) <= 0.02)),
    "sequence rejection": (
        SequenceRejection(0.5, 2.0), lambda r, lag, q, a: 1.0 * (np.abs(over(r, np.sum)) <= np.log(2.0))),
    "geometric rejection": (
        SequenceRejection(0.9, 1 / 0.9, "geometric"),
        lambda r, lag, q, a: 1.0 * (np.abs(over(r, np.mean)) <= -np.log(0.9))),
    "rejection by k2": (
        SequenceRejection(0.0, 0.04, "k2"), lambda r, lag, q, a: 1.0 * (over(r * r / 2, np.mean) <= 0.04)),
    "rejection by k3": (SequenceRejection(0.0, 0.04, "k3"), lambda r, lag, q, a: 1.0 * (over(k3(r), np.mean) <= 0.04)),
    "scaled rejection": (
        SequenceRejection(0.0, 0.0, kappa=1.0, rms=0.3), lambda r, lag, q, a: 1.0 * (np.abs(over(r, np.sum)) <= 0.6)),
    "TRL's mask": (
        SequenceMask(0.0, 1.5), lambda r, lag, q, a: np.exp(over(r, np.sum)) * (over(r, np.sum) <= np.log(1.5))),
    "IcePop": (IcePop(0.8, 1.25), lambda r, lag, q, a: np.exp(r) * (np.abs(r) <= np.log(1.25))),
    "CIS": (CIS(), lambda r, lag, q, a: np.minimum(np.exp(r), 1 + 2.3 * np.maximum(1 - np.exp(q + r), 5e-3))),
    "DPPO": (
        DPPO(0.05), lambda r, lag, q, a: 1.0 - (np.abs(np.expm1(r)) * np.exp(q) > 0.05) * (np.sign(a) * r > 0)),
    "DPPO by divergence": (
        DPPO(0.02, "kl"),
        lambda r, lag, q, a: 1.0 - (two_outcomes(np.exp(q + r), np.exp(q)) > 0.02) * (np.sign(a) * r > 0)),
    "negatives' mask": (NegativesMask(0.1), lambda r, lag, q, a: 1.0 - (a < 0) * (over(r, np.mean) < -0.1)),
    "lag": (RatioWeight(Centring("lag")), lambda r, lag, q, a: np.clip(np.exp(lag), 0.0, 2.0)),
    "lag as in PPO": (
        RatioWeight(Centring("lag", "ppo", 0.8, 1.2)),
        lambda r, lag, q, a: np.exp(lag) * ~((a > 0) & (np.exp(lag) > 1.2) | (a < 0) & (np.exp(lag) < 0.8))),
    "TIS and rejection": (
        Together(SequenceRejection(0.5, 2.0), TokenTIS(1.2)),
        lambda r, lag, q, a: np.minimum(np.exp(r), 1.2) * (np.abs(over(r, np.sum)) <= np.log(2.0))),
}  # fmt: skip


def over(x: Array, fold: Any) -> Array:
    """One value of each sequence, for all of its tokens."""
    return np.broadcast_to(fold(x, axis=1, keepdims=True), x.shape)


@pytest.mark.parametrize("three", [NOISE, LAG, BOTH], ids=["noise", "lag", "both"])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_mean_update_of_every_remedy_is_that_of_its_formula(name: str, three: Three) -> None:
    remedy, formula = FORMULAS[name]
    p, s, q = (WORLD.columns(log_softmax(logits)) for logits in (three.trainer, three.source, three.sampler))
    gains = np.repeat(WORLD.rewards[:, None], 4, axis=1)
    weights = formula(p - q, p - s, q, gains)
    assert np.abs(remedy_weights(WORLD, three, remedy, KERNELS) - weights).max() < 2e-6 * max(1.0, weights.max())
    mass = WORLD.gathered(np.exp(q.sum(1))[:, None] * gains * weights)
    exact = mass - mass.sum(1, keepdims=True) * np.exp(log_softmax(three.trainer))
    found = expected_update(WORLD, three, remedy, KERNELS)
    assert distance(found, exact) < 1e-6
    idle = {"lag", "lag as in PPO"} if three is NOISE else set()
    if name != "none" and name not in idle:  # the mutant: a remedy that does nothing
        assert distance(found, expected_update(WORLD, three, NONE, KERNELS)) > 1e-3


@pytest.mark.parametrize("ratio", ["correction", "current", "drift"])
def test_behind_the_first_update_a_remedy_goes_by_the_ratio_that_it_names(ratio: Any) -> None:
    """π_old/q, p_θ/q and p_θ/π_old are three where π_old is no longer the trainer."""
    moved = replace(BOTH, old=BOTH.trainer + 0.3 * np.random.default_rng(9).normal(size=BOTH.trainer.shape))
    assert moved.old is not None
    logits = (moved.trainer, moved.old, moved.source, moved.sampler)
    p, old, s, q = (WORLD.columns(log_softmax(z)) for z in logits)
    logs = {"correction": old - q, "current": p - q, "drift": p - old}
    gains = np.repeat(WORLD.rewards[:, None], 4, axis=1)
    remedies: dict[str, Remedy] = {
        "token TIS": TokenTIS(1.2, ratio=ratio), "token rejection": TokenRejection(0.8, 1.25, ratio=ratio),
        "IcePop": IcePop(0.8, 1.25, ratio), "sequence TIS": SequenceTIS(1.5, ratio=ratio),
        "sequence rejection": SequenceRejection(0.5, 2.0, ratio=ratio),
        "TRL's mask": SequenceMask(0.0, 1.5, ratio=ratio),
        "rejection by k3": SequenceRejection(0.0, 0.04, "k3", ratio), "negatives' mask": NegativesMask(0.1, ratio),
    }  # fmt: skip
    for name, remedy in remedies.items():
        weights = {each: FORMULAS[name][1](log, p - s, q, gains) for each, log in logs.items()}
        found = remedy_weights(WORLD, moved, remedy, KERNELS)
        apart = {each: float(np.abs(found - weight).max() / max(1.0, weight.max())) for each, weight in weights.items()}
        assert apart.pop(ratio) < 2e-6, name
        assert min(apart.values()) > 1e-2, name  # the mutants: by another ratio
        mass = WORLD.gathered(np.exp(q.sum(1))[:, None] * gains * weights[ratio])
        exact = mass - mass.sum(1, keepdims=True) * np.exp(log_softmax(moved.trainer))
        assert distance(expected_update(WORLD, moved, remedy, KERNELS), exact) < 1e-6, name
        if ratio == "drift":  # in the first update there is none
            assert (remedy_weights(WORLD, BOTH, remedy, KERNELS) == 1.0).all(), name


@pytest.mark.parametrize("three", [NOISE, LAG, BOTH], ids=["noise", "lag", "both"])
def test_sequence_is_alone_has_no_bias(three: Three) -> None:
    of = {"sequence IS": SEQUENCE_IS, "capped": SequenceTIS(1.5), "token IS": TOKEN_IS, "token TIS": TokenTIS(2.0),
          "none": NONE, "rejection": SequenceRejection(0.5, 2.0), "scores": SCORES}  # fmt: skip
    found = biases(WORLD, three, of, KERNELS)
    assert found.pop("sequence IS")[0] < 1e-6
    assert all(to_trainer > 1e-2 for to_trainer, _ in found.values()), found


def test_token_is_has_no_bias_where_there_is_one_token() -> None:
    """The counter-example: what biases it is the prefix, which keeps the sampler's distribution."""
    world = World(np.random.default_rng(0).normal(size=6), length=1)
    three = Three.drawn(world, 3, noise=0.3, lag=0.3)
    assert biases(world, three, {"token": TOKEN_IS}, KERNELS)["token"][0] < 1e-6


@pytest.mark.parametrize("three", [NOISE, BOTH], ids=["noise", "both"])
@pytest.mark.parametrize("remedy", [SCORES, DLC, Centre(Centring("sampler"))], ids=["scores", "DLC", "sampler"])
def test_no_baseline_moves_a_centred_update(remedy: Remedy, three: Three) -> None:
    plain, moved = (expected_update(WORLD, three, remedy, KERNELS, baseline) for baseline in (0.0, 7.0))
    assert distance(moved, plain) < 1e-12
    plain, moved = (expected_update(WORLD, three, NONE, KERNELS, baseline) for baseline in (0.0, 7.0))
    assert distance(moved, plain) > 0.1  # uncentred, a baseline is a drift


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0, 3.0])
def test_a_centred_update_is_the_samplers_own_gradient(noise: float) -> None:
    """For q = softmax(z + η) and any η; without centring it is not, nor is it the trainer's."""
    three = Three.drawn(WORLD, 5, noise=noise)
    truth = policy_gradient(WORLD, three.sampler)
    assert distance(expected_update(WORLD, three, SCORES, KERNELS), truth) < 1e-12
    assert (distance(expected_update(WORLD, three, NONE, KERNELS), truth) > 1e-3) == (noise > 0)
    assert (distance(policy_gradient(WORLD, three.trainer), truth) > 1e-3) == (noise > 0)


def test_dlc_is_score_centering_without_lag_and_a_token_weight_without_noise() -> None:
    free = Centre(Centring("lag", "none"))
    assert distance(expected_update(WORLD, NOISE, DLC, KERNELS), expected_update(WORLD, NOISE, SCORES, KERNELS)) < 1e-12
    weighed = expected_update(WORLD, LAG, RatioWeight(Centring("lag", "none")), KERNELS)
    assert distance(expected_update(WORLD, LAG, free, KERNELS), weighed) < 1e-6
    uncentred = expected_update(WORLD, BOTH, RatioWeight(Centring("lag", "none")), KERNELS)
    assert distance(expected_update(WORLD, BOTH, free, KERNELS), uncentred) > 1e-2


def test_on_exact_policies_no_remedy_changes_the_gradient() -> None:
    truth = policy_gradient(WORLD, EXACT.trainer)
    remedies = {**{name: remedy for name, (remedy, _) in FORMULAS.items()}, "scores": SCORES, "DLC": DLC}
    for name, remedy in remedies.items():
        assert distance(expected_update(WORLD, EXACT, remedy, KERNELS), truth) < 1e-6, name


def test_without_a_signal_only_right_remedies_stay_where_they_are() -> None:
    """Every sequence has the reward 1: each policy is a fixed point, and what moves is drift. Uncentred updates go to a
    corner whose entropy is 0, along the sampler's noise."""
    world = World(np.ones(6**2), length=2)
    begin = Three.drawn(world, 7, noise=0.5)
    tilt = begin.sampler - begin.source
    ends = {}
    for name, remedy in {
        "none": NONE,
        "token TIS": TokenTIS(1.1),
        "sequence IS": SEQUENCE_IS,
        "scores": SCORES,
    }.items():
        z = begin.trainer
        for _ in range(400):
            z = z + 2.0 * expected_update(world, Three(z, z, z + tilt), remedy, KERNELS)
        ends[name] = z
    for name in ("sequence IS", "scores"):
        assert np.abs(ends[name] - begin.trainer).max() < 1e-3, name
    entropy = [float(-(np.exp(log_softmax(z)) * log_softmax(z))[0].sum()) for z in (begin.trainer, ends["none"])]
    assert entropy[1] < 0.5 * entropy[0]
    assert np.abs(ends["token TIS"] - begin.trainer).max() > 1e-2
    moved = (ends["none"] - begin.trainer)[0]
    assert np.corrcoef(moved, tilt[0])[0, 1] > 0.5


def test_a_lag_with_negative_advantages_feeds_itself() -> None:
    """Away from a fixed sampler with a force that grows; weighted by the lag, the drift is gone."""
    world = World(-np.ones(6), length=1)
    three = Three.drawn(world, 8, lag=0.3)
    remedies = {"none": NONE, "lag": RatioWeight(Centring("lag", "none")), "DLC": DLC}
    pull = {name: expected_update(world, three, remedy, KERNELS)[0] for name, remedy in remedies.items()}
    away = np.exp(log_softmax(three.trainer))[0] - np.exp(log_softmax(three.source))[0]
    assert pull["none"] @ away > 0.9 * np.linalg.norm(away) ** 2
    assert np.abs(pull["lag"]).max() < 1e-7 and np.abs(pull["DLC"]).max() < 1e-12


def test_with_a_kept_law_the_kernel_gives_the_samplers_own_gradient() -> None:
    """For q = softmax(z + η), whose η nobody can compute again."""
    ids, ones = torch.arange(6).repeat(WORLD.prefix_count), torch.ones(6 * WORLD.prefix_count)
    rows = lambda z: torch.tensor(np.repeat(z, 6, axis=0), dtype=torch.float32)  # noqa: E731
    chance = np.exp(WORLD.columns(log_softmax(NOISE.sampler)).sum(1)) * WORLD.rewards
    given = torch.tensor(-WORLD.gathered(np.repeat(chance[:, None], 4, 1)).reshape(-1), dtype=torch.float32)
    policy = Law.of(KERNELS, rows(NOISE.trainer), ones, ids).softmax(KERNELS, ones)
    found = []
    for logits in (NOISE.sampler, NOISE.source):
        drawn = Law.of(KERNELS, rows(logits), ones, ids).softmax(KERNELS, ones)
        gradient, _, _ = KERNELS.centre(policy, drawn, None, ids, ones, given, None, None, "clamp", torch.float32)
        update = -gradient.double().numpy().reshape(WORLD.prefix_count, 6, 6).sum(axis=1)
        found.append(distance(update, policy_gradient(WORLD, NOISE.sampler)))
    assert found[0] < 1e-5
    assert found[1] > 1e-2  # the mutant: the law that is computed again, without η


STATES: Any = None  # the backward pass's bounds need no hidden states
CENTRINGS = [Centring(), Centring("lag"), Centring("sampler", "none"), Centring("lag", "truncate", 0.9, 1.1),
             Centring("lag", "ppo", 0.9, 1.1)]  # fmt: skip


@pytest.mark.parametrize("centring", CENTRINGS, ids=str)
def test_the_kernel_gives_the_gradient_that_is_enumerated(centring: Centring) -> None:
    """Every (prefix, token) is a row, with the mass that the sampler's sequences put on it."""
    p, q = log_softmax(BOTH.trainer), log_softmax(BOTH.sampler)
    chance = np.exp(WORLD.columns(q).sum(1)) * WORLD.rewards
    parts = [WORLD.gathered(np.repeat(np.where(sign * chance > 0, chance, 0.0)[:, None], 4, 1)) for sign in (1, -1)]
    mass = np.concatenate(parts).reshape(-1)
    rows = lambda z: torch.tensor(np.tile(np.repeat(z, 6, axis=0), (2, 1)), dtype=torch.float32)  # noqa: E731
    ids, ones = torch.arange(6).repeat(2 * len(p)), torch.ones(len(mass))
    softmax = lambda z: Softmax(rows(z), *KERNELS.logprob(rows(z), ids, ones)[2:4])  # noqa: E731
    given = torch.tensor(-mass, dtype=torch.float32)
    base = {"none": None, "lag": softmax(BOTH.source), "sampler": softmax(BOTH.sampler)}[centring.base]
    low, high = (None, None) if base is None else Backward(centring, STATES, STATES).bounds(given)
    outside = "zero" if centring.clip == "ppo" else "clamp"
    trainer, sampler = softmax(BOTH.trainer), softmax(BOTH.sampler)
    gradient, _, _ = KERNELS.centre(trainer, sampler, base, ids, ones, given, low, high, outside, torch.float32)
    found = -gradient.double().numpy().reshape(2, len(p), 6, 6).sum(axis=(0, 2))
    assert distance(found, expected_update(WORLD, BOTH, Centre(centring), KERNELS)) < 1e-5
