"""Effective sample sizes and acceptance are their formulas in float64, finite whatever the ratios are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vexact.training.acceptance import measure_acceptance
from vexact.training.lag import effective, k3, lognormal, measure_lag, no_lag


def test_effective_sizes_are_their_formulas() -> None:
    log = np.array([0.1, -0.7, 0.3, 2.0])
    w = np.exp(log)
    assert effective(log) == pytest.approx(w.sum() ** 2 / (4 * (w * w).sum()), rel=1e-14)
    assert lognormal(log) == pytest.approx(math.exp(-np.var(log)), rel=1e-14)
    assert effective(log) != pytest.approx(w.mean() / w.max(), rel=1e-3)  # a mutant


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_ratios_beyond_every_number_are_weighed_alike(shift: float) -> None:
    log = np.array([0.1, -0.7, 0.3, 2.0])
    assert effective(log + shift) == pytest.approx(effective(log), rel=1e-11)
    assert effective(np.array([5000.0, 0.0, 0.0, 0.0])) == 0.25  # one of four
    assert effective(np.full(7, shift)) == 1.0


def test_what_is_not_finite_has_no_effective_size() -> None:
    for broken in (math.nan, math.inf, -math.inf):
        measured = measure_lag(torch.tensor([0.0, broken]), torch.zeros(2), [slice(0, 2)])
        assert (measured["ess_token"], measured["ess_sequence"], measured["lag_k3"]) == (0.0, 0.0, math.inf)


def test_sequences_multiply_their_tokens() -> None:
    """Log-ratios of ±0.5 cancel inside a sequence or add up."""
    cuts = [slice(0, 2), slice(2, 4)]
    zeros = torch.zeros(4)
    apart, together = torch.tensor([0.5, -0.5, 0.5, -0.5]), torch.tensor([0.5, 0.5, -0.5, -0.5])
    assert measure_lag(apart, zeros, cuts)["ess_sequence"] == 1.0
    assert measure_lag(together, zeros, cuts)["ess_sequence"] == pytest.approx((math.cosh(1) ** 2) / math.cosh(2))
    assert measure_lag(apart, zeros, cuts)["ess_token"] == measure_lag(together, zeros, cuts)["ess_token"]
    assert measure_lag(zeros, zeros, cuts) == no_lag(4, 2)
    up = measure_lag(torch.ones(4), zeros, cuts)["lag_k3"]
    assert up == pytest.approx(math.e - 2.0, rel=1e-13)  # of ℓ = e; of 1/e it is e⁻¹
    k3 = [math.expm1(x) - x for x in (0.5, -0.5)]
    assert measure_lag(apart, zeros, cuts)["lag_k3"] == pytest.approx(sum(k3) / 2, rel=1e-13)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_k3_keeps_its_digits_where_policies_are_close(size: float) -> None:
    """In float32 e^d − 1 − d has none left of d = 1e-4. In float64 e^d − 1 is rounded by 2e-22 beside K3 of 3e-13 at
    d = 1e-6, which is 6e-10 of it; the series' next term is below that everywhere."""
    moved = torch.tensor([size, -size, 0.0])
    d = float(moved[0].double())
    assert k3(moved, torch.zeros(3)) == pytest.approx((d**2 / 2 + d**4 / 24) * 2 / 3, rel=1e-9)
    assert k3(torch.tensor([math.inf]), torch.zeros(1)) == math.inf


def test_lognormal_ratios_reach_one_half_at_a_spread_of_0_833() -> None:
    log = np.random.default_rng(0).normal(0.0, math.sqrt(math.log(2.0)), 200_000)
    assert effective(log) == pytest.approx(0.5, abs=0.02)
    assert lognormal(log) == pytest.approx(0.5, abs=0.005)


def test_acceptance_is_the_mean_of_ratio_and_advantage() -> None:
    log, gain = torch.tensor([0.3, -0.2, 0.1]), torch.tensor([1.0, 1.0, -2.0])
    found = measure_acceptance(log, gain, [slice(0, 2), slice(2, 3)])
    ratio = log.double().exp()
    assert found["acceptance_token_raw"] == pytest.approx(-float((ratio * gain).mean()), rel=1e-7)
    assert found["acceptance_token"] == found["acceptance_token_raw"]  # these sum to 0
    sums, firsts = torch.tensor([0.1, 0.1]).double(), torch.tensor([1.0, -2.0]).double()
    assert found["acceptance_sequence_raw"] == pytest.approx(-float((sums.exp() * firsts).mean()), rel=1e-6)
    assert found["acceptance_sequence"] == pytest.approx(-float((sums.exp() * (firsts + 0.5)).mean()), abs=1e-7)


def test_an_exact_sampler_is_always_accepted() -> None:
    gain = torch.tensor([1.0, 0.3, -2.0, 5.0])
    found = measure_acceptance(torch.zeros(4), gain, [slice(0, 2), slice(2, 4)])
    assert abs(found["acceptance_token"]) < 1e-15 and found["acceptance_token_raw"] < -1.0
    wild = measure_acceptance(torch.tensor([3e38, -3e38, 0.0, 0.0]), gain, [slice(0, 2), slice(2, 4)])
    assert all(math.isfinite(value) for value in wild.values())
