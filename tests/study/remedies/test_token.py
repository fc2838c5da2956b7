"""Remedies of single tokens are their formulas, whatever the ratios are; each with a mutant that differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_within
from vexact.model.remedy import Centring, Ratios, Remedy
from vexact.study.remedies import CIS, DPPO, IcePop, RatioWeight, TokenRejection, TokenTIS
from vexact_kernels import load

KERNELS = load()
LOGS = torch.tensor([-100.0, -2.0, -0.3, 0.0, 0.1, 0.9, 1.7, 3.0, 100.0, 3e38, -3e38])
SAMPLER = -torch.tensor([0.01, 3.0, 0.4, 0.0, 1.2, 1.0, 2.0, 4.0, 101.0, 1.0, 0.5])
EVERYONE: list[Remedy] = [
    TokenTIS(), TokenTIS(cap=3.4028e38), IcePop(), CIS(), CIS(side="sampler"), DPPO(), DPPO(0.05, "kl"),
    TokenRejection(0.5, 2.0), TokenRejection(0.0, 0.1, "k2"), TokenRejection(0.0, 0.1, "k3"),
    RatioWeight(Centring("sampler", "none")), RatioWeight(Centring("lag", "ppo", 0.8, 1.2)),
    RatioWeight(Centring("lag")),
]  # fmt: skip


def given(log: Tensor = LOGS, sampler: Tensor = SAMPLER) -> Ratios:
    return Ratios(log, log, [slice(0, len(log))], KERNELS, log, sampler)


def answer(remedy: Remedy, ratios: Ratios, sign: float = 1.0) -> tuple[list[float], list[bool]]:
    count = len(ratios.correction)
    found = remedy.weights(ratios, torch.ones(count, dtype=torch.bool), torch.full((count,), sign))
    return found.weights.tolist(), found.kept.tolist()


@pytest.mark.parametrize("remedy", EVERYONE, ids=lambda remedy: type(remedy).__name__)
@pytest.mark.parametrize("sign", [1.0, 0.0, -1.0])
def test_weights_are_finite_whatever_the_ratio_and_one_where_it_is_one(remedy: Remedy, sign: float) -> None:
    weights, _ = answer(remedy, given(), sign)
    assert all(math.isfinite(weight) and weight >= 0.0 for weight in weights)
    if not isinstance(remedy, TokenRejection) or remedy.criterion == "ratio":
        assert answer(remedy, given(torch.zeros(3), -torch.ones(3)), sign) == ([1.0] * 3, [True] * 3)


@pytest.mark.parametrize("remedy", EVERYONE, ids=lambda remedy: type(remedy).__name__)
def test_a_mask_is_only_made_smaller(remedy: Remedy) -> None:
    mask = torch.arange(len(LOGS)) % 2 == 0
    assert not (remedy.weights(given(), mask, torch.ones(len(LOGS))).kept & ~mask).any()


def test_icepop_is_the_ratio_inside_its_band_and_nothing_outside() -> None:
    weights, kept = answer(IcePop(0.5, 5.0), given())
    assert kept == [False, False, True, True, True, True, False, False, False, False, False]
    inside = torch.tensor(kept)
    assert_within(torch.tensor(weights)[inside], LOGS[inside].double().exp(), bound=1)
    assert set(torch.tensor(weights)[~inside].tolist()) == {0.0}
    assert answer(IcePop(0.5, 6.0), given())[1] != kept  # a bound that is not read would be seen


def test_confidence_bounds_the_ratio() -> None:
    """λ 2.3, κ 5e-3: at p = 1 the cap is 1.0115, at p = 0 it is 3.3."""
    log, sampler = LOGS.double(), SAMPLER.double()
    for side, p in (("trainer", (sampler + log).exp().clamp(max=1)), ("sampler", sampler.exp())):
        weights, kept = answer(CIS(side=side), given())  # type: ignore[arg-type]
        expected = torch.minimum(log.exp(), 1 + 2.3 * (1 - p).clamp(min=5e-3))
        torch.testing.assert_close(torch.tensor(weights).double(), expected, rtol=5e-7, atol=1e-43)
        assert all(kept)
    apart = given(torch.tensor([3.0, 3.0]), torch.tensor([0.0, -3.0]))
    assert answer(CIS(side="sampler"), apart)[0] == pytest.approx([1.0115, 1 + 2.3 * (1 - math.exp(-3))])
    assert answer(CIS(side="trainer"), apart)[0] == pytest.approx([1.0115, 1.0115])  # the other reading


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_leaves_out_only_what_leads_further_out(divergence: Any) -> None:
    """q = ½ and p above or below it, near and far, and every sign of the advantage."""
    p, sampler = torch.tensor([0.9, 0.55, 0.5, 0.45, 0.1]), torch.full((5,), 0.5).log()
    ratios = given(p.log() - sampler, sampler)
    remedy = DPPO(0.2 if divergence == "tv" else 0.05, divergence)
    assert answer(remedy, ratios, 1.0)[1] == [False, True, True, True, True]
    assert answer(remedy, ratios, -1.0)[1] == [True, True, True, True, False]
    assert answer(remedy, ratios, 0.0)[1] == [True] * 5
    unsigned = ((p - 0.5).abs() <= 0.2).tolist()  # the mutant: a mask that forgets the sign of A
    assert unsigned not in [answer(remedy, ratios, sign)[1] for sign in (1.0, 0.0, -1.0)]


def test_dppos_divergence_is_that_of_two_outcomes() -> None:
    """Its threshold lies exactly where q·log(q/p) + (1 − q)·log((1 − q)/(1 − p)) is δ."""
    q, p = 0.3, 0.6
    exact = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    ratios = given(torch.tensor([math.log(p / q)]), torch.tensor([math.log(q)]))
    assert [answer(DPPO(exact * scale, "kl"), ratios)[1][0] for scale in (0.999, 1.001)] == [False, True]
    assert [answer(DPPO(0.3 * scale), ratios)[1][0] for scale in (0.999, 1.001)] == [False, True]


@pytest.mark.parametrize(
    ("criterion", "value"),
    [("ratio", math.exp), ("k2", lambda x: x * x / 2), ("k3", lambda x: math.expm1(x) - x)],
)
def test_token_rejection_keeps_what_lies_inside(criterion: Any, value: Callable[[float], float]) -> None:
    found = answer(TokenRejection(0.1, 1.3, criterion), given())[1]
    assert found == [0.1 <= value(min(x, 700.0)) <= 1.3 for x in LOGS.tolist()]
    assert 0 < sum(found) < len(found)


def test_a_clip_of_ppo_forgets_on_one_side_only() -> None:
    log = torch.tensor([-1.0, 0.0, 1.0])
    remedy = RatioWeight(Centring("lag", "ppo", 0.8, 1.2))
    weights, kept = answer(remedy, given(log, log), 1.0)
    assert weights == pytest.approx([math.exp(-1), 1, 0]) and all(kept)
    assert answer(remedy, given(log, log), -1.0)[0] == pytest.approx([0, 1, math.e])
    assert answer(RatioWeight(Centring("lag")), given(log, log))[0] == pytest.approx([math.exp(-1), 1, 2])


@pytest.mark.parametrize(("ratio", "log"), [("correction", -0.4), ("current", 0.3), ("drift", 0.7)])
def test_a_weight_is_of_the_ratio_that_it_names(ratio: Any, log: float) -> None:
    one = torch.ones(1)
    ratios = Ratios(one * -0.4, one * 0.3, [slice(0, 1)], KERNELS, None, -one, one * 0.7)
    found = TokenTIS(9.0, ratio=ratio).weights(ratios, one > 0, one).weights
    assert_within(found, (one * log).double().exp(), bound=1)
    p = math.exp(-1.0 + (-0.4 if ratio == "correction" else 0.3))  # the trainer's, of the ratio's numerator
    capped = CIS(0.01, ratio=ratio).weights(ratios, one > 0, one).weights.item()
    assert capped == pytest.approx(min(math.exp(log), 1.0 + 0.01 * (1.0 - p)), rel=1e-6)
    bare = Ratios(one, one, [slice(0, 1)], KERNELS, None, -one)
    if ratio == "drift":
        with pytest.raises(ValueError, match="the drift needs log-probabilities of the trainer at the start"):
            TokenTIS(9.0, ratio=ratio).weights(bare, one > 0, one)
    else:
        assert TokenTIS(9.0, ratio=ratio).weights(bare, one > 0, one).weights.item() == pytest.approx(math.e)


def test_the_lag_ratio_is_not_the_ratio_to_the_sampler() -> None:
    one = torch.ones(1)
    ratios = Ratios(one, one, [slice(0, 1)], KERNELS, one * 0.5, -one)
    found = [
        RatioWeight(Centring(base, "none")).weights(ratios, one > 0, one).weights.item() for base in ("lag", "sampler")
    ]
    assert found == pytest.approx([math.exp(0.5), math.e])
    bare = Ratios(one, one, [slice(0, 1)], KERNELS)
    with pytest.raises(ValueError, match="the lag ratio needs log-probabilities"):
        RatioWeight(Centring("lag")).weights(bare, one > 0, one)
    with pytest.raises(ValueError, match="needs the sampler's log-probabilities"):
        CIS().weights(bare, one > 0, one)
