"""What is measured offline: against formulas written again, against known divergences, exact where sides are equal."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from vexact.arithmetic import expm1
from vexact.study.metrics import (
    IDEAL,
    OFFLINE,
    jensen_shannon,
    measure_gap,
    measure_pairs,
    measure_skew,
    measure_split,
)
from vexact.study.odds import displaced, log_odds


def sampled(n: int = 60_000, sigma: float = 0.4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens of one prefix drawn from q over six ids, with q and p known: rollouts of 100 tokens."""
    generator = np.random.default_rng(7)
    q, p = distributions(sigma)
    drawn = generator.choice(6, size=n, p=q)
    columns = (torch.split(torch.from_numpy(np.log(x)[drawn].astype(np.float32)), 100) for x in (q, p))
    return list(zip(*columns, strict=True))


def distributions(sigma: float = 0.4) -> tuple[np.ndarray, np.ndarray]:
    z = np.random.default_rng(8).normal(size=6)
    noisy = z + sigma * np.random.default_rng(9).normal(size=6)
    q, p = (np.exp(x) / np.exp(x).sum() for x in (noisy, z))
    return q, p


def test_estimates_come_near_the_divergences_that_they_estimate() -> None:
    q, p = distributions()
    found, n = measure_pairs(sampled()), 60_000
    kl = float((q * np.log(q / p)).sum())
    middle = (q + p) / 2
    js = float((q * np.log(q / middle)).sum() + (p * np.log(p / middle)).sum()) / 2
    chi2 = float((p * p / q).sum()) - 1
    # five standard errors of each estimate
    assert abs(found["k1"] - kl) < 5 * math.sqrt(found["m2"] / n)
    assert abs(found["k3"] - kl) < 5 * found["k3_std"] / math.sqrt(n)
    assert abs(found["ratio_mean"] - 1.0) < 5 * math.sqrt(chi2 / n)
    assert found["js"] == pytest.approx(js, rel=0.03)
    assert found["ess"] == pytest.approx(1 / (1 + chi2), rel=0.01)
    assert found["entropy_sampler"] == pytest.approx(float(-(q * np.log(q)).sum()), rel=0.01)
    assert found["entropy_trainer"] == pytest.approx(float(-(p * np.log(p)).sum()), rel=0.01)
    assert found["k3_per_entropy"] == found["k3"] / found["entropy_sampler"]
    assert abs(found["k1"] + kl) > 5 * math.sqrt(found["m2"] / n)  # the mutant: the other sign of Δ


def test_each_offline_measure_is_its_formula() -> None:
    given = sampled(2000)
    q, p = (np.concatenate([pair[side].double().numpy() for pair in given]) for side in (0, 1))
    d, found = p - q, measure_pairs(given)
    r = np.exp(d)
    logit = [x - np.log1p(-np.exp(x)) for x in (p, q)]
    moved = np.sort(logit[0] - logit[1])
    middle = moved[len(moved) // 2 - 1]
    expected = {
        "m2": (d * d).mean(),
        "js": (r * d - (1 + r) * np.log((1 + r) / 2)).mean() / 2,
        "pearson": statistics.correlation(np.exp(q).tolist(), np.exp(p).tolist()),
        "k3_max": (r - 1 - d).max(),
        "k3_std": (r - 1 - d).std(),
        "log_odds_tokens": 2000,
        "log_odds_mad": np.sort(np.abs(moved - middle))[999],
        "log_odds_p05": moved[99],
        "log_odds_p95": moved[1899],
        "k3_per_entropy": (r - 1 - d).mean() / -q.mean(),
        "entropy_sampler": -q.mean(),
        "entropy_trainer": -(r * p).mean(),
    }
    assert found == pytest.approx({**measure_gap(given), **expected}, rel=1e-9)
    assert set(found) == set(IDEAL) | set(OFFLINE) | {"entropy_sampler", "entropy_trainer"}


def test_equal_bits_give_exact_zeros_and_ones() -> None:
    given = [(q, q.clone()) for q, _ in sampled(1000)]
    found = measure_pairs(given)
    assert {name: found[name] for name in OFFLINE} == {**OFFLINE, "log_odds_tokens": 1000}
    assert found["entropy_sampler"] == found["entropy_trainer"] > 0.0
    assert measure_pairs([])["tokens"] == 0
    any_sizes = -3.0 * torch.rand(60, generator=torch.Generator().manual_seed(4))  # whose roots need not multiply back
    assert {measure_pairs([(x, x.clone())])["pearson"] for x in (any_sizes[:n] for n in range(2, 60))} == {1.0}


def test_a_small_divergence_of_jensen_and_shannon_keeps_its_digits() -> None:
    delta = np.random.default_rng(6).uniform(1e-7, 2e-7, 200)
    assert jensen_shannon(delta) == pytest.approx(delta**2 / 8, rel=1e-6, abs=0.0)
    r = np.exp(delta)
    in_one_step = (r * delta - (1 + r) * np.log((1 + r) / 2)) / 2  # the mutant
    assert np.abs(in_one_step / (delta**2 / 8) - 1).max() > 1e-3


def test_a_certain_token_has_no_log_odds_and_is_left_out() -> None:
    q = torch.tensor([0.0, -1e-7, -1.0, -2.0])
    p = torch.tensor([-1e-7, 1e-8, -1.0, -2.5])
    found = measure_pairs([(q, p)])
    assert found["log_odds_tokens"] == 2
    assert all(math.isfinite(value) for value in found.values())


def test_the_ratio_follows_from_the_displacement_of_log_odds() -> None:
    generator = np.random.default_rng(1)
    q = -np.exp(generator.uniform(-9, 2, 500))
    epsilon = generator.normal(0, 0.7, 500)
    delta = displaced(q, epsilon)
    assert log_odds(q + delta, q) == pytest.approx(epsilon, rel=1e-6, abs=1e-9)
    p = np.exp(q + delta)
    assert 1.0 + expm1(delta) == pytest.approx(p + (1 - p) * np.exp(epsilon), rel=1e-12)


def test_skew_is_told_apart_by_the_sign_of_the_advantage() -> None:
    q = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.1]), torch.tensor([-3.0])]
    p = [torch.tensor([-1.5, -2.0]), torch.tensor([-1.5]), torch.tensor([-1.0])]
    found = measure_skew(list(zip(q, p, strict=True)), [2.0, -1.0, 0.0])
    assert found["skew_positive"] == pytest.approx(-(math.exp(-0.5) - 1) * 2.0 / 2, rel=1e-6)
    assert found["skew_negative"] == pytest.approx(math.exp(-1.4) - 1, rel=1e-6)
    assert (found["skew_positive_tokens"], found["skew_negative_tokens"]) == (2, 1)
    assert (found["bad_tokens"], found["bad_fraction"]) == (1, 0.25)  # .905 → .223, and its advantage is negative
    assert measure_skew(list(zip(q, p, strict=True)), [2.0, 1.0, 0.0])["bad_tokens"] == 0
    equal = measure_skew([(x, x) for x in q], [2.0, -1.0, 0.0])
    assert (equal["skew_positive"], equal["skew_negative"], equal["bad_fraction"]) == (0.0, 0.0, 0.0)


def test_parts_of_the_ratio_add_up_and_show_where_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    recorded = [-3.0 * torch.rand(n, generator=generator) for n in (4, 9, 30)]
    exact = [x + 0.02 * torch.randn(len(x), generator=generator) for x in recorded]
    old = [x + 0.2 * torch.randn(len(x), generator=generator) for x in exact]
    current = [x + 0.05 * torch.randn(len(x), generator=generator) for x in old]
    found = measure_split(current, exact, recorded, old)
    assert found["whole/k1"] == pytest.approx(
        found["drift/k1"] + found["staleness/k1"] + found["discrepancy/k1"], abs=1e-7
    )
    assert found["lag/k1"] == pytest.approx(found["drift/k1"] + found["staleness/k1"], abs=1e-7)
    assert found["discrepancy/k3"] < found["drift/k3"] < found["staleness/k3"]
    fresh = measure_split(exact, exact, recorded)
    assert (fresh["lag/k3"], fresh["lag/ess_sequence"]) == (0.0, 1.0)
    assert fresh["whole/k3"] == fresh["discrepancy/k3"] > 0.0
    assert not any(name.startswith("drift") for name in fresh)
