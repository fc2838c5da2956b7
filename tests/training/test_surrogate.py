"""Each policy loss and its gradient are those of its formula, written here a second time in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, assert_within
from vexact.recipe import LossSection, RecipeError
from vexact.training.loss import sequence_lengths, sequence_log_ratios
from vexact.training.surrogate import SURROGATES, Surrogate, Terms
from vexact_kernels import load

KERNELS = load()
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
COUNT = sum(LENGTHS)
CUTS = [slice(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS))]
SECTIONS = {
    "reinforce": LossSection(name="reinforce"),
    "ppo": LossSection(epsilon_low=0.2, epsilon_high=0.28),
    "dual": LossSection(epsilon_low=0.2, epsilon_high=0.28, dual_clip=1.5),
    "gspo": LossSection(name="gspo", epsilon_low=0.03, epsilon_high=0.04),
    "scaled": LossSection(name="gspo", epsilon_low=0.03, epsilon_high=0.04, epsilon_length=34.0),
    "cispo": LossSection(name="cispo", cap=1.4),
}


def terms(spread: float = 0.4) -> Terms:
    """Ratios on both sides of every bound, advantages of both signs and 0, one a sequence; divisors of a mean."""
    generator = torch.Generator().manual_seed(0)
    anchor = -3 * torch.rand(COUNT, generator=generator)
    current = anchor + spread * torch.randn(COUNT, generator=generator)
    each = torch.randn(len(LENGTHS), generator=generator)
    each[4] = 0.0
    lengths = torch.tensor(LENGTHS)
    advantage = each.repeat_interleave(lengths)
    weight = advantage / (len(LENGTHS) * lengths).repeat_interleave(lengths).float()
    means = sequence_log_ratios(current, anchor, CUTS, None, KERNELS)
    return Terms(current, anchor, advantage, weight, means, sequence_lengths(CUTS, None))


def computed(given: Terms, section: LossSection) -> tuple[Surrogate, Tensor]:
    """Losses, and their gradient with respect to log π."""
    current = given.current.clone().requires_grad_()
    found = SURROGATES[section.name](replace(given, current=current), section, KERNELS)
    found.loss.backward(torch.ones_like(found.loss))
    assert current.grad is not None
    return found, current.grad


def clipped(ratio: Tensor, weight: Tensor, section: LossSection) -> Tensor:
    bounded = ratio.clamp(1 - section.epsilon_low, 1 + section.epsilon_high)
    return torch.minimum(ratio * weight, bounded * weight)


def dual(ratio: Tensor, weight: Tensor, section: LossSection) -> Tensor:
    objective = clipped(ratio, weight, section)
    return torch.where(weight < 0, torch.maximum(objective, section.dual_clip * weight), objective)


def sequences(ratio: Tensor, weight: Tensor, section: LossSection) -> Tensor:
    """One term a sequence: its ratio is the geometric mean, and no token has one of its own."""
    means = torch.stack([ratio[cut].log().mean().exp() for cut in CUTS])
    whole = torch.stack([weight[cut].sum() for cut in CUTS])
    return clipped(means, whole, section)


def scaled(ratio: Tensor, weight: Tensor, section: LossSection) -> Tensor:
    """The same with bounds of each sequence's own."""
    found = []
    for cut, length in zip(CUTS, LENGTHS, strict=True):
        factor = (section.epsilon_length / length) ** 0.5
        mean, whole = ratio[cut].log().mean().exp(), weight[cut].sum()
        bounded = mean.clamp(1 - factor * section.epsilon_low, 1 + factor * section.epsilon_high)
        found.append(torch.minimum(mean * whole, bounded * whole))
    return torch.stack(found)


def objective_of(name: str, current: Tensor, anchor: Tensor, weight: Tensor, section: LossSection) -> Tensor:
    ratio = (current - anchor).exp()
    if name == "reinforce":
        return current * weight
    if name == "cispo":
        return ratio.detach().clamp(max=section.cap) * weight * current
    shapes: dict[str, Callable[[Tensor, Tensor, LossSection], Tensor]] = {
        "ppo": clipped,
        "dual": dual,
        "gspo": sequences,
        "scaled": scaled,
    }
    return shapes[name](ratio, weight, section)


def check(name: str, section: LossSection) -> None:
    """`section` computed against the formula under `name` in SECTIONS."""
    given = terms()
    found, gradient = computed(given, section)
    exact = given.current.double().requires_grad_()
    objective = objective_of(name, exact, given.anchor.double(), given.weight.double(), SECTIONS[name])
    (-objective).sum().backward()
    assert exact.grad is not None
    value, loss = -objective.detach(), found.loss.detach().double()
    if name in ("gspo", "scaled"):
        loss = torch.stack([loss[cut].sum() for cut in CUTS])
    # float32 log-ratios of about 1, rounded once (6e-8), means of up to 89 of them, exp, two products
    assert (loss - value).abs().max() < 1e-6 * value.abs().max()
    assert (gradient.double() - exact.grad).abs().max() < 1e-6 * exact.grad.abs().max()
    assert int((exact.grad == 0).sum()) == int((gradient == 0).sum())


@pytest.mark.parametrize("name", SECTIONS)
def test_loss_and_gradient_are_those_of_the_formula(name: str) -> None:
    check(name, SECTIONS[name])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("reinforce", SECTIONS["ppo"]),
        ("ppo", SECTIONS["dual"]),
        ("ppo", replace(SECTIONS["ppo"], epsilon_low=0.28, epsilon_high=0.2)),
        ("ppo", SECTIONS["cispo"]),
        ("dual", SECTIONS["ppo"]),
        ("dual", replace(SECTIONS["dual"], dual_clip=1.6)),
        ("gspo", replace(SECTIONS["ppo"], epsilon_low=0.03, epsilon_high=0.04)),
        ("gspo", replace(SECTIONS["gspo"], epsilon_high=0.03)),
        ("gspo", SECTIONS["scaled"]),
        ("scaled", SECTIONS["gspo"]),
        ("scaled", replace(SECTIONS["scaled"], epsilon_length=21.0)),
        ("cispo", replace(SECTIONS["cispo"], cap=2.4)),  # 1 + ε where ε was meant
        ("cispo", SECTIONS["reinforce"]),
    ],
)
def test_another_formula_would_be_seen(name: str, wrong: LossSection) -> None:
    with pytest.raises(AssertionError):
        check(name, wrong)


@pytest.mark.parametrize("name", SECTIONS)
def test_on_policy_every_gradient_is_that_of_reinforce_in_every_bit(name: str) -> None:
    given = terms(spread=0.0)
    found, gradient = computed(given, SECTIONS[name])
    assert_same_bits(found.ratio, torch.ones(COUNT))
    assert not found.clipped.any()
    assert_same_bits(gradient, computed(given, SECTIONS["reinforce"])[1])
    assert_same_bits(gradient.abs(), given.weight.abs())


@pytest.mark.parametrize("name", SECTIONS)
def test_an_advantage_of_zero_gives_no_loss_and_no_gradient_however_large_the_ratio(name: str) -> None:
    far = torch.tensor([0.0, -100.0, 100.0])
    given = Terms(torch.full((3,), -1.0), far, torch.zeros(3), torch.zeros(3), -1.0 - far, torch.ones(3))
    found, gradient = computed(given, SECTIONS[name])
    assert gradient.count_nonzero() == found.loss.count_nonzero() == 0


@pytest.mark.parametrize("name", SECTIONS)
def test_what_overflows_is_harmless_where_a_bound_holds_it_and_seen_where_none_does(name: str) -> None:
    """Log-ratios of +100 and −100 with advantages of both signs."""
    log_ratio = torch.tensor([100.0, 100.0, -100.0, -100.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    given = Terms(torch.zeros(4), -log_ratio, advantage, advantage, log_ratio, torch.ones(4))
    found, gradient = computed(given, SECTIONS[name])
    assert not found.loss.isnan().any() and not gradient.isnan().any()
    unbounded = [name in ("ppo", "gspo", "scaled") and a < 0 < x for x, a in zip(log_ratio, advantage, strict=True)]
    assert found.loss.isinf().tolist() == gradient.isinf().tolist() == unbounded


def test_the_bounds_bind_on_the_side_of_the_sign() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.25, 1.25, 9.0, 9.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    given = Terms(ratio.log(), torch.zeros(7), advantage, advantage, None)
    plain, _ = computed(given, LossSection(epsilon_low=0.2, epsilon_high=0.2))
    both, _ = computed(given, LossSection(epsilon_low=0.2, epsilon_high=0.2, dual_clip=3.0))
    higher, _ = computed(given, LossSection(epsilon_low=0.2, epsilon_high=0.3))
    assert plain.clipped.tolist() == [False, True, False, True, False, True, False]
    assert both.clipped.tolist() == [False, True, False, True, False, True, True]
    assert higher.clipped.tolist() == [False, True, False, False, False, True, False]
    assert_within(both.loss[6:].detach(), torch.tensor([3.0]).double(), bound=1)


def test_gspo_clips_a_sequence_whole_and_cispo_keeps_a_gradient() -> None:
    given = terms()
    found, gradient = computed(given, SECTIONS["gspo"])
    for cut in CUTS:
        assert len(set(found.ratio[cut].tolist())) == len(set(found.clipped[cut].tolist())) == 1
    assert 0 < int(found.clipped.sum()) < COUNT
    assert int(gradient.count_nonzero()) == int((~found.clipped & (given.advantage != 0)).sum())
    found, gradient = computed(given, SECTIONS["cispo"])
    assert 20 < int(found.clipped.sum()) < COUNT
    assert int(gradient.count_nonzero()) == int(given.advantage.count_nonzero())


def test_gspo_without_its_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="gspo needs sequence_log_ratio"):
        computed(replace(terms(), sequence_log_ratio=None), SECTIONS["gspo"])
    with pytest.raises(ValueError, match="gspo with epsilon_length needs sequence_length"):
        computed(replace(terms(), sequence_length=None), SECTIONS["scaled"])
    with pytest.raises(RecipeError, match=r"loss\.epsilon_length = 34 with loss\.name = ppo"):
        LossSection(epsilon_length=34.0)


def test_bounds_that_scale_with_length_are_the_fixed_ones_at_their_own_length() -> None:
    given = replace(terms(), sequence_length=torch.full((COUNT,), 34.0))
    (fixed, gradient), (scaled, other) = (computed(given, SECTIONS[name]) for name in ("gspo", "scaled"))
    assert_same_bits(scaled.loss.detach(), fixed.loss.detach())
    assert_same_bits(other, gradient)
    lengths = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))
    assert sequence_lengths(CUTS, None).tolist() == lengths.tolist()
    mask = torch.tensor([True, False, True, False])
    assert sequence_lengths([slice(0, 3), slice(3, 4)], mask).tolist() == [2, 2, 2, 0]
