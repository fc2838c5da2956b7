"""The loss of a token is a formula of that token and of the step's counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, assert_within, flushing_denormals
from vexact.recipe import LossSection
from vexact.training.loss import TokenLosses, clipped_surrogate, divisors
from vexact.training.subnormals import keeping_subnormals
from vexact.verification.checks import thread_count
from vexact_kernels import load

KERNELS = load()
SECTION = LossSection(clip_low=0.2, clip_high=0.3)
FAINT = (torch.tensor([-80.0]), torch.zeros(1), torch.tensor([1e-3]), torch.tensor([1000.0]))  # a loss of -1.8e-41


def tokens(count: int = 400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """current, behaviour, advantage, divisor of tokens whose ratios lie on both sides of both bounds."""
    generator = torch.Generator().manual_seed(0)
    behaviour = -3 * torch.rand(count, generator=generator)
    current = behaviour + 0.4 * torch.randn(count, generator=generator)
    return current, behaviour, torch.randn(count, generator=generator), torch.full((count,), float(count))


def losses(current: Tensor, behaviour: Tensor, advantage: Tensor, divisor: Tensor) -> tuple[TokenLosses, Tensor]:
    """Losses, and their gradients with respect to `current`."""
    current = current.clone().requires_grad_()
    found = clipped_surrogate(current, behaviour, advantage, divisor, SECTION, KERNELS)
    found.loss.backward(torch.ones_like(found.loss))
    assert current.grad is not None
    return found, current.grad


@keeping_subnormals()
def guarded(*given: Tensor) -> tuple[TokenLosses, Tensor]:
    """As the trainer computes them."""
    return losses(*given)


def test_loss_and_gradient_are_those_of_the_ppo_formula() -> None:
    current, behaviour, advantage, divisor = tokens()
    found, gradient = losses(current, behaviour, advantage, divisor)
    exact = (current - behaviour).double().requires_grad_()  # the difference is rounded once in either
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
    current, _, advantage, divisor = tokens()
    found, gradient = losses(current, current.clone(), advantage, divisor)
    assert_same_bits(found.ratio, torch.ones_like(current))
    assert not found.clipped.any()
    assert_same_bits(gradient, -(advantage / divisor))


def test_an_advantage_of_zero_gives_no_gradient_however_large_the_ratio() -> None:
    current, behaviour = torch.zeros(3), torch.tensor([0.0, -100.0, 100.0])
    found, gradient = losses(current, behaviour, torch.zeros(3), torch.ones(3))
    assert gradient.count_nonzero() == 0
    assert found.loss.count_nonzero() == 0
    assert not found.clipped.any()


def test_a_clipped_token_is_selected_away_before_its_ratio_overflows() -> None:
    behaviour = torch.tensor([-100.0, 100.0])
    found, gradient = losses(torch.zeros(2), behaviour, torch.tensor([1.0, -1.0]), torch.ones(2))
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
    for given in (tokens(), FAINT):
        expected, gradient = losses(*given)
        with flushing_denormals():
            found, got = guarded(*given)
        assert_same_bits(found.loss.detach(), expected.loss.detach())
        assert_same_bits(got, gradient)


def test_a_loss_that_obeys_the_callers_flush_mode_would_be_seen() -> None:
    expected, gradient = losses(*FAINT)
    assert -1.81e-41 < expected.loss.item() < -1.80e-41
    assert_same_bits(gradient, expected.loss.detach())  # of −w·exp(Δ) in Δ: itself
    with flushing_denormals():
        found, got = losses(*FAINT)
    assert found.loss.item() == got.item() == 0.0


def test_many_tokens_are_computed_in_threads_that_may_have_been_born_flushing() -> None:
    """Torch divides large tensors among threads, and a thread keeps the mode of the one that made it."""
    many = tuple(x.expand(100_000) for x in FAINT)
    expected = losses(*FAINT)[1]

    def born_flushing() -> tuple[Tensor, Tensor]:
        with flushing_denormals():
            torch.ones(1_000_000).mul(2.0)  # the first product of a thread makes those that help it
            found, gradient = guarded(*many)
        with keeping_subnormals():
            unguarded = torch.full((100_000,), 2.0**-126) * 0.5
        return torch.stack([found.loss.detach(), gradient]), unguarded

    with thread_count(2), ThreadPoolExecutor(1) as pool:
        found, unguarded = pool.submit(born_flushing).result()
    assert_same_bits(found, expected.expand(2, 100_000))
    if unguarded.count_nonzero() == 100_000:
        pytest.skip("the helpers of this torch take the mode of whoever asks: nothing was tested")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token_mean", [6, 6, 6, 6, 6, 6]), ("sequence_mean", [3, 6, 6, 9, 9, 9]), ("fixed", [30, 30, 30, 30, 30, 30])],
)
def test_divisors_count_what_the_mode_names(mode: str, expected: list[int]) -> None:
    found = divisors([1, 2, 3], replace(SECTION, aggregation=mode, fixed_length=10))
    assert found.tolist() == expected
