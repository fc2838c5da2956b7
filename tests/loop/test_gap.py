"""What `tim/*` measures, against formulas written again in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from vexact.loop.gap import IDEAL, exp, expm1, measure_gap

Pairs = list[tuple[Tensor, Tensor]]


def pairs(scale: float = 0.3, lengths: tuple[int, ...] = (1, 5, 2, 40)) -> Pairs:
    generator = torch.Generator().manual_seed(5)
    recorded = [-3.0 * torch.rand(length, generator=generator) for length in lengths]
    return [(x, x + scale * torch.randn(len(x), generator=generator)) for x in recorded]


def plain(given: Pairs) -> dict[str, float]:
    """The same measures, one token and one sequence after the other."""
    tokens = [(q, p) for pair in given for q, p in zip(*(side.double().tolist() for side in pair), strict=True)]
    delta = [p - q for q, p in tokens]
    ratio = [math.exp(d) for d in delta]
    sums = [(pair[1].double() - pair[0].double()).sum().item() for pair in given]
    log_ppl = [-s / len(pair[0]) for s, pair in zip(sums, given, strict=True)]
    probability = [abs(math.exp(p) - math.exp(q)) for q, p in tokens]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        "tokens": len(tokens),
        "differing": sum(q != p for q, p in tokens),
        "abs_mean": mean([abs(d) for d in delta]),
        "abs_max": max(abs(d) for d in delta),
        "k1": -mean(delta),
        "k2": mean([d * d for d in delta]) / 2,
        "k3": mean([r - 1 - d for r, d in zip(ratio, delta, strict=True)]),
        "ratio_min": min(ratio),
        "ratio_mean": mean(ratio),
        "ratio_max": max(ratio),
        "multiplicative_error": mean([math.exp(abs(d)) for d in delta]),
        "ess": sum(ratio) ** 2 / (len(ratio) * sum(r * r for r in ratio)),
        "chi2_token": mean([r * r for r in ratio]) - 1,
        "chi2_sequence": mean([math.exp(2 * max(-20, min(20, s))) for s in sums]) - 1,
        "probability_mean": mean(probability),
        "probability_max": max(probability),
        "log_ppl_mean": mean(log_ppl),
        "log_ppl_abs_mean": mean([abs(x) for x in log_ppl]),
        "log_ppl_min": min(log_ppl),
        "log_ppl_max": max(log_ppl),
        "ppl_ratio": mean([math.exp(x) for x in log_ppl]),
    }


@pytest.mark.parametrize("scale", [1e-6, 0.3, 8.0])
def test_every_measure_is_its_formula(scale: float) -> None:
    given = pairs(scale)
    found = measure_gap(given)
    assert found.keys() == IDEAL.keys()
    # Both sides round in float64; beside 1, the plain formula of k3 and χ² has lost all but 16 digits.
    assert found == pytest.approx(plain(given), rel=1e-12, abs=1e-15)


def test_a_small_k3_keeps_its_digits() -> None:
    delta = [float(p) - float(q) for q, p in zip(*(side.tolist() for side in pairs(1e-6, (40,))[0]), strict=True)]
    with mpmath.workdps(50):
        exact = float(sum(mpmath.expm1(d) - d for d in delta) / len(delta))
    assert measure_gap(pairs(1e-6, (40,)))["k3"] == pytest.approx(exact, rel=1e-6, abs=0.0)
    in_one_step = sum(math.exp(d) - 1 - d for d in delta) / len(delta)
    assert in_one_step != pytest.approx(
        exact, rel=1e-6, abs=0.0
    )  # the mutant: 1 is subtracted from a rounded exponential


def test_equal_bits_are_the_ideal_and_so_are_zeros_of_either_sign() -> None:
    given = [(x, x.clone()) for x, _ in pairs()]
    assert measure_gap(given) == {**IDEAL, "tokens": 48}
    signs = [(torch.tensor([0.0, -1.0]), torch.tensor([-0.0, -1.0]))]
    assert measure_gap(signs) == {**IDEAL, "tokens": 2, "differing": 1}
    assert measure_gap([]) == IDEAL


def test_the_order_of_rollouts_changes_no_bit_but_their_cuts_matter() -> None:
    given = pairs()
    assert measure_gap(given[::-1]) == measure_gap(given)
    whole = [(torch.cat([q for q, _ in given]), torch.cat([p for _, p in given]))]
    assert measure_gap(whole)["k1"] == measure_gap(given)["k1"]
    assert measure_gap(whole)["log_ppl_mean"] != measure_gap(given)["log_ppl_mean"]


@pytest.mark.parametrize("ours, exact", [(exp, mpmath.exp), (expm1, mpmath.expm1)])
def test_the_exponential_is_within_two_ulps(
    ours: Callable[[np.ndarray], np.ndarray], exact: Callable[[float], mpmath.mpf]
) -> None:
    generator = np.random.default_rng(1)
    x = np.concatenate([generator.uniform(-40, 40, 300), generator.normal(0, 1e-5, 300), [0.0, 700.0, -700.0]])
    with mpmath.workdps(40):
        wrong = [float(abs(y - exact(v)) / math.ulp(float(exact(v)))) for v, y in zip(x.tolist(), ours(x), strict=True)]
    assert max(wrong) <= 2.0
    assert ours(np.array([-np.inf]))[0] == exact(-mpmath.inf)
