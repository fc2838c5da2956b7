"""What `tim/*` measures, against formulas written again in plain Python."""

from __future__ import annotations

import math
import statistics

import mpmath
import pytest
import torch
from torch import Tensor

from vexact.study.metrics import IDEAL, measure_gap

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

    def share(logs: list[float]) -> float:
        weights = [math.exp(x) for x in logs]
        return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))

    ordered = sorted(abs(d) for d in delta)
    return {
        "tokens": len(tokens),
        "sequences": len(given),
        "abs_p95": ordered[math.ceil(0.95 * len(delta)) - 1],
        "abs_p99": ordered[math.ceil(0.99 * len(delta)) - 1],
        "extreme_fraction": mean([float(max(r, 1 / r) > 2) for r in ratio]),
        "ess_lognormal": math.exp(-statistics.pvariance(delta)),
        "ess_sequence": share(sums),
        "ess_sequence_lognormal": math.exp(-statistics.pvariance(sums)),
        "probability_std": statistics.stdev(probability),
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
    assert measure_gap(given) == {**IDEAL, "tokens": 48, "sequences": 4}
    signs = [(torch.tensor([0.0, -1.0]), torch.tensor([-0.0, -1.0]))]
    assert measure_gap(signs) == {**IDEAL, "tokens": 2, "sequences": 1, "differing": 1}
    assert measure_gap([]) == IDEAL


def test_the_order_of_rollouts_changes_no_bit_but_their_cuts_matter() -> None:
    given = pairs()
    assert measure_gap(given[::-1]) == measure_gap(given)
    whole = [(torch.cat([q for q, _ in given]), torch.cat([p for _, p in given]))]
    assert measure_gap(whole)["k1"] == measure_gap(given)["k1"]
    assert measure_gap(whole)["log_ppl_mean"] != measure_gap(given)["log_ppl_mean"]


def test_small_differences_make_the_three_estimates_one() -> None:
    found = measure_gap([(x, x + 1e-3 * torch.randn(4000, generator=torch.Generator().manual_seed(2)))
                         for x in [-torch.rand(4000, generator=torch.Generator().manual_seed(1))]])  # fmt: skip
    assert found["k3"] == pytest.approx(found["k2"], rel=2e-3)
    assert abs(found["k1"]) < 5 * 1e-3 / math.sqrt(4000)  # of either sign: its own noise is larger than what it is of
    assert measure_gap(pairs(1.0))["k3"] != pytest.approx(measure_gap(pairs(1.0))["k2"], rel=2e-3)


def test_the_effective_share_is_one_over_one_and_chi_squared() -> None:
    found = measure_gap(pairs())
    chi2 = (found["chi2_token"] + 1.0) / found["ratio_mean"] ** 2 - 1.0  # of the weights divided by their mean
    assert found["ess"] == pytest.approx(1.0 / (1.0 + chi2), rel=1e-12)
    assert found["ess"] != pytest.approx(1.0 / (1.0 + found["chi2_token"]), rel=1e-3)  # of weights that are not


def test_the_effective_share_of_long_sequences_is_not_cut_off() -> None:
    """Σ Δ of 900 overflows an exponential and is far beyond where χ² stops; logarithms carry it."""
    given = [(torch.full((100,), -9.5), torch.full((100,), -0.5)), (torch.full((100,), -1.0), torch.full((100,), -2.0))]
    found = measure_gap(given)
    assert found["ess_sequence"] == 0.5  # one of the two counts
    assert found["chi2_sequence"] == pytest.approx(math.exp(40.0) / 2.0)
    far = measure_gap([(torch.tensor([-500.0, -1.0]), torch.tensor([-1.0, -1.0]))])
    assert far["ess"] == pytest.approx(0.5)  # the square of e^499 would be infinite
