"""The loss of a token is a formula of that token and of the step's counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, assert_within, flushing_denormals
from vexact.recipe import LossSection
from vexact.training.loss import Exp, TokenLosses, clipped_surrogate, divisors
from vexact_kernels import load

KERNELS = load()
SECTION = LossSection(clip_low=0.2, clip_high=0.3)


def tokens(count: int = 400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """new, old, advantage, divisor of tokens whose ratios lie on both sides of both bounds."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(count, generator=generator)
    new = old + 0.4 * torch.randn(count, generator=generator)
    return new, old, torch.randn(count, generator=generator), torch.full((count,), float(count))


def losses(new: Tensor, old: Tensor, advantage: Tensor, divisor: Tensor) -> tuple[TokenLosses, Tensor]:
    """Losses, and their gradients with respect to `new`."""
    new = new.clone().requires_grad_()
    found = clipped_surrogate(new, old, advantage, divisor, SECTION, KERNELS)
    found.loss.backward(torch.ones_like(found.loss))
    assert new.grad is not None
    return found, new.grad


def test_loss_and_gradient_are_those_of_the_ppo_formula() -> None:
    new, old, advantage, divisor = tokens()
    found, gradient = losses(new, old, advantage, divisor)
    exact = (new - old).double().requires_grad_()  # the difference is rounded once in either
    ratio, a = exact.exp(), advantage.double()
    objective = torch.minimum(ratio * a, ratio.clamp(1 - SECTION.clip_low, 1 + SECTION.clip_high) * a)
    loss = -objective / divisor.double()
    loss.sum().backward()
    assert exact.grad is not None
    # exp to 1 ulp, then a division and a product: 2.5 ulps at most
    assert_within(found.loss.detach(), loss.detach(), bound=2.5)
    assert_within(gradient, exact.grad, bound=2.5)
    assert int(found.clipped.sum()) == int((exact.grad == 0).sum()) > 50


def test_on_policy_every_ratio_is_exactly_one_and_nothing_is_clipped() -> None:
    new, _, advantage, divisor = tokens()
    found, gradient = losses(new, new.clone(), advantage, divisor)
    assert_same_bits(found.ratio, torch.ones_like(new))
    assert not found.clipped.any()
    assert_same_bits(gradient, -(advantage / divisor))


def test_an_advantage_of_zero_gives_no_gradient_however_large_the_ratio() -> None:
    new, old = torch.zeros(3), torch.tensor([0.0, -100.0, 100.0])
    found, gradient = losses(new, old, torch.zeros(3), torch.ones(3))
    assert gradient.count_nonzero() == 0
    assert found.loss.count_nonzero() == 0
    assert not found.clipped.any()


def test_a_clipped_token_is_selected_away_before_its_ratio_overflows() -> None:
    old = torch.tensor([-100.0, 100.0])
    found, gradient = losses(torch.zeros(2), old, torch.tensor([1.0, -1.0]), torch.ones(2))
    assert found.clipped.tolist() == [True, True]
    assert gradient.tolist() == [0.0, 0.0]
    assert found.loss.tolist() == [-torch.tensor(1.3).item(), torch.tensor(0.8).item()]


def test_a_ratio_that_overflows_and_is_not_clipped_is_not_hidden() -> None:
    found, gradient = losses(torch.zeros(1), torch.tensor([-100.0]), torch.tensor([-1.0]), torch.ones(1))
    assert found.loss.item() == torch.inf
    assert gradient.item() == torch.inf


def test_a_token_does_not_know_its_batch() -> None:
    whole, gradient = losses(*tokens())
    for part in (slice(0, 1), slice(3, 10), slice(17, 400)):
        found, piece = losses(*(x[part] for x in tokens()))
        assert_same_bits(found.loss.detach(), whole.loss.detach()[part])
        assert_same_bits(piece, gradient[part])


def test_the_callers_flush_mode_is_no_part_of_a_loss() -> None:
    expected, gradient = losses(*tokens())
    with flushing_denormals():
        found, got = losses(*tokens())
    assert_same_bits(found.loss.detach(), expected.loss.detach())
    assert_same_bits(got, gradient)


def test_the_gradient_of_exp_is_exp() -> None:
    x = torch.linspace(-80, 80, 1001).requires_grad_()
    y = Exp.apply(x, KERNELS)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_same_bits(x.grad, KERNELS.exp(x.detach()))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token_mean", [6, 6, 6, 6, 6, 6]), ("sequence_mean", [3, 6, 6, 9, 9, 9]), ("fixed", [30, 30, 30, 30, 30, 30])],
)
def test_divisors_count_what_the_mode_names(mode: str, expected: list[int]) -> None:
    found = divisors([1, 2, 3], replace(SECTION, aggregation=mode, fixed_length=10))
    assert found.tolist() == expected
