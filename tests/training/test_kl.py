"""Each estimator has the mean that is claimed for its value and for its gradient: all tokens are enumerated."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, assert_within
from vexact.recipe import KLSection, LossSection, RecipeError
from vexact.training.kl import kl_penalty, kl_term, kl_value
from vexact.training.loss import Tokens, token_losses
from vexact_kernels import load

KERNELS = load()
VOCABULARY = 9


def logits(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_gradient(kl: KLSection, sampled: Tensor) -> Tensor:
    """With respect to the policy's logits, the mean over tokens drawn with log-probabilities `sampled` of the gradient
    of β·k in a loss."""
    policy = logits(0).requires_grad_()
    logprob = policy.log_softmax(-1)
    current = logprob.detach().float().requires_grad_()
    nothing, ones = torch.zeros(VOCABULARY), torch.ones(VOCABULARY)
    tokens = Tokens(current, sampled.float(), nothing, ones, reference=logits(1).log_softmax(-1).float())
    token_losses(tokens, LossSection(kl=kl), KERNELS).loss.backward(ones)
    assert current.grad is not None
    (logprob * current.grad.double() * sampled.exp()).sum().backward()
    assert policy.grad is not None
    return policy.grad


def divergence_gradient(forward: bool) -> Tensor:
    """Of KL(π ‖ π_ref), or of KL(π_ref ‖ π)."""
    policy = logits(0).requires_grad_()
    ours, theirs = policy.log_softmax(-1), logits(1).log_softmax(-1)
    pair = (theirs, ours) if forward else (ours, theirs)
    (pair[0].exp() * (pair[0] - pair[1])).sum().backward()
    assert policy.grad is not None
    return policy.grad


def close(found: Tensor, expected: Tensor) -> bool:
    """float32 terms of size 1: 1e-6."""
    return bool((found - expected).abs().max() < 1e-6)


ON_POLICY = logits(0).log_softmax(-1)
OFF_POLICY = logits(2).log_softmax(-1)


@pytest.mark.parametrize("sampled", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("estimator", "forward"), [("k2", False), ("k3+", False), ("k3", True)])
def test_the_gradient_has_the_mean_of_a_divergences_own(estimator: str, forward: bool, sampled: Tensor) -> None:
    found = expected_gradient(KLSection(1.0, estimator), sampled)
    assert close(found, divergence_gradient(forward))
    assert not close(found, divergence_gradient(not forward))


def test_off_policy_the_importance_weight_is_what_makes_it_so() -> None:
    off = KLSection(1.0, "k2", importance=False)
    assert close(expected_gradient(off, ON_POLICY), divergence_gradient(forward=False))
    assert not close(expected_gradient(off, OFF_POLICY), divergence_gradient(forward=False))


def test_k1_in_a_loss_would_be_no_penalty_and_is_refused_with_the_reason() -> None:
    policy = logits(0).requires_grad_()
    logprob = policy.log_softmax(-1)
    (logprob.detach().exp() * (logprob - logits(1).log_softmax(-1))).sum().backward()  # as a loss would take k1
    assert policy.grad is not None and policy.grad.abs().max() < 1e-15
    with pytest.raises(
        RecipeError, match=r"loss\.kl\.estimator = k1 in the loss: .* whose mean is 0 whatever π_ref is"
    ):
        KLSection(0.1, "k1")
    in_reward = KLSection(0.1, "k1", "reward")
    with pytest.raises(ValueError, match="k1 is no estimator for a loss"):
        kl_term(torch.zeros(1), torch.zeros(1), in_reward, KERNELS)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
def test_k1_and_k3_have_the_mean_of_the_divergence(estimator: str) -> None:
    reference = logits(1).log_softmax(-1)
    exact = (ON_POLICY.exp() * (ON_POLICY - reference)).sum()
    values = kl_value(ON_POLICY.float(), reference.float(), KLSection(1.0, estimator, "reward"), KERNELS)
    assert abs((ON_POLICY.exp() * values.double()).sum() - exact) < 1e-6
    biased = kl_value(ON_POLICY.float(), reference.float(), KLSection(1.0, "k2"), KERNELS)
    assert abs((ON_POLICY.exp() * biased.double()).sum() - exact) > 1e-3


def test_in_a_reward_k1_gives_the_gradient_of_the_divergence_and_k3_does_not() -> None:
    reference = logits(1).log_softmax(-1)
    for estimator, right in (("k1", True), ("k3", False)):
        kl = KLSection(1.0, estimator, "reward")
        penalty = kl_value(ON_POLICY.float(), reference.float(), kl, KERNELS).double()
        policy = logits(0).requires_grad_()
        (policy.log_softmax(-1) * penalty * ON_POLICY.exp()).sum().backward()
        assert policy.grad is not None
        assert close(policy.grad, divergence_gradient(forward=False)) == right


def test_a_rollouts_penalty_is_the_coefficient_times_the_sum_over_its_tokens() -> None:
    current, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    assert kl_penalty(current, reference, KLSection(0.5, "k1", "reward"), KERNELS) == 0.5 * (0.5 - 1.0)
    assert kl_penalty(current, reference, KLSection(0.5, "k2", "reward"), KERNELS) == 0.5 * (0.125 + 0.5)
    k3 = math.expm1(-0.5) + 0.5 + math.expm1(1.0) - 1.0
    assert kl_penalty(current, reference, KLSection(0.5, "k3+", "reward"), KERNELS) == pytest.approx(0.5 * k3, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_values_and_gradients_of_single_tokens_are_those_of_the_formula(estimator: str) -> None:
    difference = torch.linspace(-2.0, 2.0, 41)
    current = difference.clone().requires_grad_()
    found = kl_term(current, torch.zeros(41), KLSection(1.0, estimator), KERNELS)
    found.backward(torch.ones(41))
    exact = difference.double()
    value = exact * exact / 2 if estimator == "k2" else torch.expm1(-exact) + exact
    slope = -torch.expm1(-exact) if estimator == "k3" else exact
    assert current.grad is not None
    assert (found.detach().double() - value).abs().max() < 1e-6
    assert (current.grad.double() - slope).abs().max() < 1e-6
    if estimator != "k3":
        assert_same_bits(current.grad, difference)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_at_the_reference_value_and_gradient_are_exactly_zero(estimator: str) -> None:
    current = torch.tensor([-1.0, -20.0, 0.0], requires_grad=True)
    found = kl_term(current, current.detach().clone(), KLSection(1.0, estimator), KERNELS)
    found.backward(torch.ones(3))
    assert current.grad is not None
    assert found.count_nonzero() == current.grad.count_nonzero() == 0


def test_the_term_is_scaled_by_coefficient_divisor_and_importance() -> None:
    current = torch.tensor([-1.0], requires_grad=True)
    anchor, nothing = torch.tensor([-1.5]), torch.zeros(1)
    tokens = Tokens(current, anchor, nothing, torch.tensor([4.0]), reference=torch.tensor([-3.0]))
    section = LossSection(kl=KLSection(0.5, "k2"))
    found = token_losses(tokens, section, KERNELS)
    assert_within(found.loss.detach(), torch.tensor([2.0 * 0.5 / 4 * math.exp(0.5)]).double(), bound=3)
    assert found.kl.tolist() == [2.0]
    plain = replace(section, kl=replace(section.kl, importance=False))
    assert token_losses(tokens, plain, KERNELS).loss.tolist() == [0.25]
