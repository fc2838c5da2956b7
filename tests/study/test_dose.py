"""The dose: a divergence, and the size of noise that causes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vexact.model.policy import Policy, Scored
from vexact.recipe import MismatchSection
from vexact.study.dose import DoseError, Frozen, kl, log_softmax, solve
from vexact.study.mismatch import Mismatch
from vexact_kernels import load


def random_logs(rows: int, columns: int, width: float, seed: int = 0) -> np.ndarray:
    z = np.random.default_rng(seed).normal(size=(rows, columns)) * width
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def test_kl_is_the_sum_over_the_vocabulary() -> None:
    q, p = random_logs(5, 40, 2.0, 1), random_logs(5, 40, 2.0, 2)
    expected = (np.exp(q) * (q - p)).sum(axis=1)
    assert np.allclose(kl(q, p), expected, rtol=1e-12)


def test_kl_of_close_distributions_keeps_its_digits() -> None:
    """Of a shift of 1e-9 the plain sum loses all of them: 5e-19 beside terms of 1."""
    z = np.random.default_rng(0).normal(size=(1, 30))
    shifted = z + 1e-9 * np.random.default_rng(1).normal(size=z.shape)
    logs = [x - np.log(np.exp(x).sum()) for x in (shifted, z)]
    exact = 0.5 * (np.exp(logs[1]) * (logs[0] - logs[1]) ** 2).sum()
    assert kl(*logs)[0] == pytest.approx(exact, rel=1e-4, abs=1e-19)


def test_kl_takes_a_token_that_cannot_be_drawn() -> None:
    q, p = np.array([[0.0, -np.inf]]), np.log(np.array([[0.25, 0.75]]))
    assert kl(q, p)[0] == pytest.approx(math.log(4.0))


@pytest.mark.parametrize("target", [1e-6, 6e-4, 0.1, 0.9])
def test_a_size_is_found_where_the_divergence_saturates_too(target: float) -> None:
    dose = solve(target, lambda sigma: 1.0 - math.exp(-3.0 * sigma * sigma), 7)
    assert 1.0 - math.exp(-3.0 * dose.sigma**2) == pytest.approx(target, rel=0.01)
    assert dose.sigma == float(f"{dose.sigma:.3e}")
    assert dose.positions == 7


def test_a_dose_out_of_reach_is_refused_with_what_was_found() -> None:
    with pytest.raises(DoseError, match=r"no sigma .* gives K3 2"):
        solve(2.0, lambda sigma: 1.0 - math.exp(-sigma * sigma), 7)


def test_a_jump_past_the_dose_is_taken_where_it_is_small() -> None:
    """As numbers of 16 bits make one: below σ = 1 the divergence is 0.95 of the dose, from there on 1.2 of it."""
    assert solve(0.01, lambda sigma: 0.0095 if sigma < 1 else 0.012, 7).divergence == 0.0095
    with pytest.raises(DoseError, match=r"the nearest is 0\.008"):
        solve(0.01, lambda sigma: 0.008 if sigma < 1 else 0.0121, 7)


def test_divergence_is_at_the_temperature_of_each_token() -> None:
    policy, other = Policy.load("tiny", load()), Policy.load("tiny", load(), torch.bfloat16)
    sequences = [Scored([1, 2, 3, 4, 5], 2, 1.0), Scored([7, 8, 9], 1, 0.5)]
    logits = [[each.double() for each in p.logits(sequences)] for p in (policy, other)]
    temperatures = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5], dtype=torch.float64)[:, None]
    p, q = ((torch.cat(each) / temperatures).log_softmax(-1) for each in logits)
    expected = (q.exp() * (q - p)).sum(-1).mean()
    frozen = Frozen(policy, sequences, 4096)
    assert frozen.divergence(other) == pytest.approx(float(expected), rel=1e-6)
    assert frozen.divergence(policy) == 0.0
    switch = Mismatch(MismatchSection(site="logits", sigma=0.3), 0)
    noisy = switch.sampler(policy, 0)
    assert frozen.divergence(noisy, same_states=True) == frozen.divergence(noisy) > 0
    assert frozen.divergence(other, noisy) != frozen.divergence(noisy, other)
    assert frozen.divergence(noisy, noisy) == 0.0
    assert Frozen(policy, sequences, 3).divergence(other) == pytest.approx(frozen.divergence(other), rel=1e-12)


def test_as_many_positions_are_frozen_as_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.load("tiny", load())
    sequences = [Scored([1, 2, 3, 4, 5], 2)] * 9
    assert Frozen(policy, sequences, 4096).positions == 27
    monkeypatch.setattr("vexact.study.dose.POSITIONS", 7)
    monkeypatch.setattr("vexact.study.dose.VALUES", 1)
    assert Frozen(policy, sequences, 4096).positions == 9
    assert Frozen(policy, sequences[:2], 4096).positions == 6


def test_log_softmax_is_that_of_the_policys_logprobs() -> None:
    policy = Policy.load("tiny", load())
    sequence = Scored([1, 2, 3, 4, 5], 2, 0.7)
    found = np.concatenate(list(log_softmax(policy, [sequence], 4096)))
    chosen = found[np.arange(3), [3, 4, 5]]
    assert np.allclose(chosen, policy.logprobs([sequence]).logprob.numpy(), atol=2e-6)  # float32 beside float64
