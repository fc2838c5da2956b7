"""The loss of a token is a formula of that token, of its sequence and of the update's counts."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, flushing_denormals
from vexact.recipe import KLSection, LossSection
from vexact.training.loss import TokenLosses, Tokens, sequence_log_ratios, token_losses
from vexact.training.subnormals import keeping_subnormals
from vexact.verification.checks import thread_count
from vexact_kernels import load

KERNELS = load()
COUNT = 400
FAINT = Tokens(
    torch.tensor([-80.0]), torch.zeros(1), torch.tensor([1e-3]), torch.tensor([1000.0])
)  # a loss of −1.8e-41
PLAIN = LossSection()
SECTIONS = {
    name: LossSection(name=name, kl=KLSection(0.1, estimator), entropy_coef=0.01, dual_clip=2.0, cap=1.3)
    for name, estimator in (("reinforce", "k2"), ("ppo", "k3+"), ("gspo", "k3"), ("cispo", "k2"))
}
SECTIONS["gspo"] = replace(SECTIONS["gspo"], epsilon_length=12.0)


def tokens(count: int = COUNT) -> Tokens:
    """Ratios on both sides of every bound, and every column filled but the mask."""
    generator = torch.Generator().manual_seed(0)
    columns = [torch.rand(count, generator=generator) for _ in range(3)]
    anchor = -3 * columns[0]
    return Tokens(
        current=anchor + 0.4 * torch.randn(count, generator=generator),
        anchor=anchor,
        advantage=torch.randn(count, generator=generator),
        divisor=torch.full((count,), float(count)),
        entropy=2 * columns[1],
        reference=anchor + 0.4 * torch.randn(count, generator=generator),
        sequence_log_ratio=0.4 * torch.randn(count, generator=generator),
        sequence_length=1.0 + 20.0 * columns[2],
        weight=2 * columns[2],
    )


def losses(given: Tokens, section: LossSection = PLAIN) -> tuple[TokenLosses, Tensor, Tensor]:
    """Losses, and their gradients with respect to log π and to the entropy."""
    current = given.current.clone().requires_grad_()
    entropy = (torch.zeros_like(current) if given.entropy is None else given.entropy.clone()).requires_grad_()
    found = token_losses(replace(given, current=current, entropy=entropy), section, KERNELS)
    found.loss.backward(torch.ones_like(found.loss))
    assert current.grad is not None
    return found, current.grad, torch.zeros_like(current) if entropy.grad is None else entropy.grad


def picked(given: Tokens, part: slice | Tensor) -> Tokens:
    columns = {field.name: getattr(given, field.name) for field in fields(Tokens)}
    taken: dict[str, Any] = {name: None if column is None else column[part] for name, column in columns.items()}
    return Tokens(**taken)


@keeping_subnormals()
def guarded(given: Tokens) -> tuple[TokenLosses, Tensor, Tensor]:
    """As the trainer computes them."""
    return losses(given)


def test_the_parts_of_a_loss_are_added_each_over_the_divisor() -> None:
    given = tokens()
    assert given.entropy is not None and given.reference is not None and given.weight is not None
    section = replace(SECTIONS["ppo"], epsilon_high=0.3)
    found, gradient, to_entropy = losses(given, section)
    exact = given.current.double().requires_grad_()
    anchor, w = given.anchor.double(), given.advantage.double() * given.weight.double()
    ratio = (exact - anchor).exp()
    policy = torch.minimum(ratio * w, ratio.clamp(0.8, 1.3) * w)
    policy = torch.where(w < 0, torch.maximum(policy, 2.0 * w), policy)
    away = exact - given.reference.double()
    k2, k3 = away * away / 2, (torch.expm1(-away) + away).detach()
    importance = ratio.detach()
    ((-policy + 0.1 * k2 * importance) / COUNT).sum().backward()
    value = (-policy + 0.1 * k3 * importance - 0.01 * given.entropy.double()) / COUNT
    assert exact.grad is not None
    # float32 sums of three terms of the size of the largest
    assert (found.loss.detach().double() - value).abs().max() < 5e-7 * value.detach().abs().max()
    assert (gradient.double() - exact.grad).abs().max() < 5e-7 * exact.grad.abs().max()
    assert_same_bits(to_entropy, torch.full((COUNT,), -0.01) / given.divisor)
    assert (found.kl.double() - k3).abs().max() < 1e-6
    for other in (replace(section, entropy_coef=0.02), replace(section, kl=KLSection(0.2, "k3+")), PLAIN):
        assert (losses(given, other)[0].loss.detach().double() - value).abs().max() > 1e-3 * value.detach().abs().max()


def test_on_policy_every_ratio_is_exactly_one_and_nothing_is_clipped() -> None:
    given = Tokens(*(getattr(tokens(), name) for name in ("current", "current", "advantage", "divisor")))
    found, gradient, _ = losses(given)
    assert_same_bits(found.ratio, torch.ones(COUNT))
    assert not found.clipped.any()
    assert_same_bits(gradient, -(given.advantage / given.divisor))
    assert found.kl.count_nonzero() == 0


@pytest.mark.parametrize("name", SECTIONS)
def test_a_token_does_not_know_its_batch(name: str) -> None:
    whole, *gradients = losses(tokens(), SECTIONS[name])
    for part in (slice(0, 1), slice(3, 10), slice(17, 400)):
        found, *pieces = losses(picked(tokens(), part), SECTIONS[name])
        for field in fields(TokenLosses):
            assert_same_bits(getattr(found, field.name).detach(), getattr(whole, field.name).detach()[part])
        assert_same_bits(pieces, [gradient[part] for gradient in gradients])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SECTIONS)
def test_what_a_mask_leaves_out_is_as_if_it_were_not_there(name: str, poison: float) -> None:
    given = tokens()
    mask = torch.rand(COUNT, generator=torch.Generator().manual_seed(5)) < 0.6
    columns = {field.name: getattr(given, field.name) for field in fields(Tokens) if field.name != "mask"}
    spoiled = Tokens(**{key: column.where(mask, poison) for key, column in columns.items()}, mask=mask)
    found, *gradients = losses(spoiled, SECTIONS[name])
    expected, *exact = losses(picked(given, mask), SECTIONS[name])
    assert_same_bits(found.loss.detach()[mask], expected.loss.detach())
    assert_same_bits([gradient[mask] for gradient in gradients], exact)
    for left_out in (found.loss.detach(), found.kl, *gradients):
        assert left_out[~mask].count_nonzero() == 0
    assert not found.clipped[~mask].any()


def test_a_mask_that_multiplied_would_be_seen() -> None:
    """The mutant of the test above."""
    given = tokens()
    mask = torch.arange(COUNT) % 2 == 0
    spoiled = replace(given, current=given.current.where(mask, math.nan))
    assert (losses(spoiled, SECTIONS["ppo"])[0].loss * mask).isnan().any()


def test_the_same_poison_in_a_trained_token_is_not_hidden() -> None:
    for name in ("current", "anchor", "advantage", "reference", "weight"):
        column = getattr(tokens(), name).clone()
        column[7] = math.nan
        found, gradient, _ = losses(replace(tokens(), **{name: column}), SECTIONS["ppo"])
        assert found.loss[7].isnan() or gradient[7].isnan(), name
        assert not found.loss[:7].isnan().any() and not gradient[8:].isnan().any()


def test_a_sequences_log_ratio_is_the_mean_over_its_trained_tokens_and_knows_no_other() -> None:
    given, cuts = tokens(), [slice(0, 1), slice(1, 30), slice(30, 400)]
    mask = torch.arange(COUNT) % 3 != 1
    for chosen in (None, mask):
        whole = sequence_log_ratios(given.current, given.anchor, cuts, chosen, KERNELS)
        for cut in cuts:
            rows = torch.arange(COUNT)[cut] if chosen is None else torch.arange(COUNT)[cut][chosen[cut]]
            exact = (given.current - given.anchor).double()[rows].mean()
            assert len(set(whole[cut].tolist())) == 1
            assert abs(whole[cut][0] - exact) < 1e-6
            own = None if chosen is None else chosen[cut]
            alone = sequence_log_ratios(
                given.current[cut], given.anchor[cut], [slice(0, cut.stop - cut.start)], own, KERNELS
            )
            assert_same_bits(alone, whole[cut])


def test_the_callers_flush_mode_is_no_part_of_a_loss() -> None:
    for given in (tokens(), FAINT):
        expected, gradient, _ = losses(given)
        with flushing_denormals():
            found, got, _ = guarded(given)
        assert_same_bits(found.loss.detach(), expected.loss.detach())
        assert_same_bits(got, gradient)


def test_a_loss_that_obeys_the_callers_flush_mode_would_be_seen() -> None:
    expected, gradient, _ = losses(FAINT)
    assert -1.81e-41 < expected.loss.item() < -1.80e-41
    assert_same_bits(gradient, expected.loss.detach())  # of −w·exp(Δ) in Δ: itself
    with flushing_denormals():
        found, got, _ = losses(FAINT)
    assert found.loss.item() == got.item() == 0.0


def test_many_tokens_are_computed_in_threads_that_may_have_been_born_flushing() -> None:
    """Torch divides large tensors among threads, and a thread keeps the mode of the one that made it."""
    many = Tokens(*(x.expand(100_000) for x in (FAINT.current, FAINT.anchor, FAINT.advantage, FAINT.divisor)))
    expected = losses(FAINT)[1]

    def born_flushing() -> tuple[Tensor, Tensor]:
        with flushing_denormals():
            torch.ones(1_000_000).mul(2.0)  # the first product of a thread makes those that help it
            found, gradient, _ = guarded(many)
        with keeping_subnormals():
            unguarded = torch.full((100_000,), 2.0**-126) * 0.5
        return torch.stack([found.loss.detach(), gradient]), unguarded

    with thread_count(2), ThreadPoolExecutor(1) as pool:
        found, unguarded = pool.submit(born_flushing).result()
    assert_same_bits(found, expected.expand(2, 100_000))
    if unguarded.count_nonzero() == 100_000:
        pytest.skip("the helpers of this torch take the mode of whoever asks: nothing was tested")
