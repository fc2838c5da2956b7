"""centre: the gradient of score centering, its weights ratios to a base that bounds hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from helpers import LAYOUTS, Layout, agree, assert_same_bits, flushing_denormals, normal
from memory import far_rows
from vexact_kernels import float32
from vexact_kernels.contract import DTYPES, OUTSIDE, Kernels, Softmax, grad_dtype
from vexact_kernels.reference import Reference

SIZES = [1, 5, 32, 129, 1023, 1024, 1025]
TEMPERATURES = [1.0, 0.0, 0.6, 1.7, 0.0, 1e-3, 1.0]
INFINITY = torch.inf


@dataclass(frozen=True)
class Given:
    """What a call is given; `base` None leaves the weights at one."""

    policy: Tensor
    sampler: Tensor
    base: Tensor | None
    ids: Tensor
    temperature: Tensor
    d_logprob: Tensor
    low: Tensor
    high: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Given:
        """Every matrix of logits changed."""
        base = None if self.base is None else change(self.base)
        return replace(self, policy=change(self.policy), sampler=change(self.sampler), base=base)

    def part(self, rows: slice) -> Given:
        return Given(*(None if x is None else x[rows] for x in vars(self).values()))  # type: ignore[arg-type]


def given(vocabulary: int, temperatures: Sequence[float] = TEMPERATURES, scale: float = 3.0) -> Given:
    """A policy, a sampler and a base beside it, as noise and updates leave them; some ratios are out of bounds."""
    n = len(temperatures)
    policy = normal(n, vocabulary, scale=scale)
    ids = torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(1))
    sampler, base = (policy + normal(n, vocabulary, seed=seed, scale=0.4) for seed in (2, 3))
    low, high = 0.7 + 0.05 * torch.arange(n), 1.3 + 0.1 * torch.arange(n)
    return Given(policy, sampler, base, ids, torch.tensor(temperatures), normal(n, seed=4), low, high)


def softmax(kernels: Kernels, logits: Tensor, one: Given) -> Softmax:
    return Softmax(logits, *kernels.logprob(logits, one.ids, one.temperature, entropy=False)[2:4])


def centred(
    kernels: Kernels, one: Given, outside: str = "clamp", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    base = None if one.base is None else softmax(kernels, one.base, one)
    low, high = (None, None) if base is None else (one.low, one.high)
    policy, sampler = softmax(kernels, one.policy, one), softmax(kernels, one.sampler, one)
    return kernels.centre(policy, sampler, base, one.ids, one.temperature, one.d_logprob, low, high, outside, dtype)


def agreed(
    everyone: Sequence[Kernels], one: Given, outside: str = "clamp", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """What all implementations give."""
    result: tuple[Tensor, Tensor, Tensor] = agree(lambda k: centred(k, one, outside, dtype), everyone)
    return result


def distance_to_bounds(one: Given) -> Tensor:
    """Of each ratio, float64 [N, V]."""
    assert one.base is not None
    heat = torch.where(one.temperature == 0, 1.0, one.temperature).double()[:, None]
    log_p, log_b = ((x.double() / heat).log_softmax(-1) for x in (one.policy, one.base))
    ratio = (log_p - log_b).exp()
    return torch.minimum((ratio - one.low[:, None]).abs(), (ratio - one.high[:, None]).abs())


def clear_of_bounds(one: Given) -> Given:
    """The same with a base that leaves no ratio so near a bound that rounding decides."""
    assert one.base is not None
    return replace(one, base=torch.where(distance_to_bounds(one) < 1e-3, one.base + 0.03, one.base))


def exact(one: Given, outside: str) -> tuple[Tensor, Tensor, Tensor]:
    """float64, by autograd of g·(sg(w_a) log p(a) - Σ_v sg(q_v w_v) log p(v)): d_logits, w_a, W."""
    heat = torch.where(one.temperature == 0, 1.0, one.temperature).double()[:, None]
    z = one.policy.double().requires_grad_()
    log_p, q = (z / heat).log_softmax(-1), (one.sampler.double() / heat).softmax(-1)
    if one.base is None:
        w = torch.ones_like(q)
    else:
        ratio = (log_p.detach() - (one.base.double() / heat).log_softmax(-1)).exp()
        low, high = one.low.double()[:, None], one.high.double()[:, None]
        assert distance_to_bounds(one).min() > 1e-5, "a ratio so near its bound may fall to either side of it"
        inside = (ratio >= low) & (ratio <= high)
        w = torch.where(inside, ratio, 0.0) if outside == "zero" else torch.minimum(torch.maximum(ratio, low), high)
    w_id = w.gather(1, one.ids[:, None])[:, 0]
    logprob = log_p.gather(1, one.ids[:, None])[:, 0]
    (d,) = torch.autograd.grad(one.d_logprob.double() @ (w_id * logprob - (q * w * log_p).sum(-1)), z)
    return d, w_id, (q * w).sum(-1)


def assert_exact(actual: tuple[Tensor, Tensor, Tensor], one: Given, outside: str) -> None:
    # log p of some 20 rounds by half an ulp, 2^-20, three times in p, q and each side of a ratio
    d, w_id, total = exact(one, outside)
    assert (actual[0].double() - d).abs().max() <= 2.0**-17 * d.abs().max()
    assert (actual[1].double() - w_id).abs().max() <= 2.0**-17 * max(1.0, float(w_id.max()))
    assert (actual[2].double() - total).abs().max() <= 2.0**-17 * max(1.0, float(total.max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_all_implementations_agree(everyone: list[Kernels], vocabulary: int, outside: str, dtype: torch.dtype) -> None:
    d, w_id, total = agreed(everyone, given(vocabulary), outside, dtype)
    assert d.dtype == grad_dtype(dtype) and w_id.dtype == total.dtype == torch.float32
    assert d.isfinite().all() and w_id.isfinite().all() and total.isfinite().all()


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_a_real_vocabulary_agrees(everyone: list[Kernels], vocabulary: int) -> None:
    agreed(everyone, given(vocabulary, [0.6]), "zero", torch.bfloat16)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("vocabulary", [1, 5, 32, 1025, 49_152])
def test_values_against_float64(compiled: list[Kernels], vocabulary: int, outside: str) -> None:
    one = clear_of_bounds(given(vocabulary, [1.0, 0.6, 1.7, 0.0]))
    assert_exact(centred(compiled[-1], one, outside), one, outside)


@pytest.mark.parametrize("vocabulary", [5, 1025])
def test_values_without_a_base_against_float64(compiled: list[Kernels], vocabulary: int) -> None:
    one = replace(given(vocabulary, [1.0, 0.6, 1.7, 0.0]), base=None)
    assert_exact(centred(compiled[-1], one), one, "clamp")


def test_the_other_way_to_be_outside_is_seen(compiled: list[Kernels]) -> None:
    """The mutant of the check above: most bounds are met by some ratio."""
    one = given(1025, [1.0, 0.6, 1.7, 0.0])
    with pytest.raises(AssertionError):
        assert_exact(centred(compiled[-1], one, "zero"), one, "clamp")


def test_a_gradient_without_its_centre_is_seen(compiled: list[Kernels]) -> None:
    one = given(1025, [1.0, 0.6, 1.7, 0.0])
    _, w_id, total = centred(compiled[-1], one)
    p = softmax(compiled[-1], one.policy, one)
    plain = compiled[-1].logprob_backward(
        p.logits, one.ids, one.temperature, p.max, p.sum, None, one.d_logprob * w_id, None, torch.float32
    )
    with pytest.raises(AssertionError):
        assert_exact((plain, w_id, total), one, "clamp")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_without_a_base_it_is_the_samplers_own_gradient_bit_for_bit(
    everyone: list[Kernels], vocabulary: int, dtype: torch.dtype
) -> None:
    one = replace(given(vocabulary), base=None, policy=torch.full((len(TEMPERATURES), vocabulary), torch.nan))
    for kernels in everyone:
        d, w_id, total = centred(kernels, one, dtype=dtype)
        q = softmax(kernels, one.sampler, one)
        own = kernels.logprob_backward(
            q.logits, one.ids, one.temperature, q.max, q.sum, None, one.d_logprob, None, dtype
        )
        assert_same_bits(d, own, kernels.name)
        assert_same_bits([w_id, total], [torch.ones(len(d))] * 2, kernels.name)


def test_weights_that_are_one_in_fact_give_it_up_to_rounding(everyone: list[Kernels]) -> None:
    """A base that is the policy: every ratio is exp(0), and W = Σ q is one but for the rounding of its sum."""
    one = given(1025)
    one = replace(one, base=one.policy)
    d, w_id, total = agreed(everyone, one)
    own, _, _ = centred(everyone[-1], replace(one, base=None))
    assert_same_bits(w_id, torch.ones(len(d)))
    assert (total - 1).abs().max() <= 2.0**-20
    heat = torch.where(one.temperature == 0, 1.0, one.temperature)[:, None]
    assert ((d - own).abs() * heat / one.d_logprob.abs()[:, None]).max() <= 2.0**-20


def test_on_policy_it_is_the_ordinary_gradient(everyone: list[Kernels]) -> None:
    """Policy, sampler and base of the same bits: the score of what was sampled has the mean 0 already."""
    one = given(1025, [1.0, 0.6])
    one = replace(one, sampler=one.policy, base=one.policy)
    d, _, _ = agreed(everyone, one)
    p = softmax(everyone[0], one.policy, one)
    own = everyone[0].logprob_backward(
        p.logits, one.ids, one.temperature, p.max, p.sum, None, one.d_logprob, None, torch.float32
    )
    assert (d - own).abs().max() <= 2.0**-20 * own.abs().max()


@pytest.mark.parametrize("outside", OUTSIDE)
def test_the_weight_of_the_id_is_the_held_ratio_of_its_logprobs(everyone: list[Kernels], outside: str) -> None:
    one = given(129)
    assert one.base is not None
    for kernels in everyone:
        _, w_id, _ = centred(kernels, one, outside)
        log_p, log_b = (kernels.logprob(x, one.ids, one.temperature)[0] for x in (one.policy, one.base))
        ratio = kernels.exp(log_p - log_b)
        outer = (ratio < one.low) | (ratio > one.high)
        held = torch.where(outer, 0.0, ratio) if outside == "zero" else ratio.maximum(one.low).minimum(one.high)
        assert_same_bits(w_id, held, kernels.name)


def test_a_row_sums_to_nothing(compiled: list[Kernels]) -> None:
    """Adding a constant to all logits changes no probability, so the gradient has no part along it."""
    d, _, _ = centred(compiled[-1], given(1025, [1.0, 0.6, 1.7]))
    assert (d.double().sum(-1).abs() / d.double().abs().sum(-1)).max() <= 2.0**-18


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout) -> None:
    one = given(129)
    expected = centred(everyone[0], one)
    for kernels in everyone:
        assert_same_bits(centred(kernels, one.each(layout)), expected, kernels.name)


def test_a_row_does_not_know_its_batch(everyone: list[Kernels]) -> None:
    one = given(129)
    expected = centred(everyone[0], one)

    def spoil(x: Tensor) -> Tensor:
        return torch.where(torch.arange(len(x))[:, None] % 2 == 0, torch.nan, x)

    for kernels in everyone:
        actual = centred(kernels, one.each(spoil))
        assert_same_bits([t[1::2] for t in actual], [t[1::2] for t in expected], kernels.name)
        assert_same_bits(centred(kernels, one.part(slice(3, 4))), [t[3:4] for t in expected], kernels.name)


def test_rows_may_lie_further_apart_than_two_to_the_31_elements(compiled: list[Kernels]) -> None:
    one = given(33, [1.0, 0.7])
    expected = centred(Reference(), one)
    for name in ("policy", "sampler", "base"):
        actual = centred(compiled[-1], replace(one, **{name: far_rows(getattr(one, name))}))
        assert_same_bits(actual, expected)


def test_a_temperature_of_zero_or_one_leaves_the_logits_as_they_are(everyone: list[Kernels]) -> None:
    one = given(33)
    ones, zeros = (replace(one, temperature=torch.full_like(one.temperature, t)) for t in (1.0, 0.0))
    for kernels in everyone:
        assert_same_bits(centred(kernels, zeros), centred(kernels, ones), kernels.name)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("dead", [-1e30, -INFINITY])
def test_a_token_that_all_have_masked_contributes_nothing(everyone: list[Kernels], dead: float, outside: str) -> None:
    one = given(129)
    masked = torch.zeros(129, dtype=torch.bool)
    masked[::3] = True
    one = replace(one, ids=torch.arange(len(TEMPERATURES)) * 3 + 1)  # a sampled token is not masked
    with_dead = one.each(lambda x: torch.where(masked, dead, x))
    d, w_id, total = agreed(everyone, with_dead, outside)
    assert_same_bits(d[:, masked], torch.zeros(len(d), int(masked.sum())))
    assert d.isfinite().all() and w_id.isfinite().all() and total.isfinite().all()
    if dead == -INFINITY:  # the order of the tree is one of places, so the other sums keep their bits
        far = agreed(everyone, one.each(lambda x: torch.where(masked, -1e30, x)), outside)
        assert_same_bits([d, w_id, total], far)


def dead_somewhere(policy: float, sampler: float, base: float, low: float, high: float) -> Given:
    """Three tokens; the first one has these logits, the others are alike everywhere, and the second was sampled."""
    p, q, b = (torch.tensor([[first, 0.5, -0.5]]) for first in (policy, sampler, base))
    one = torch.ones(1)
    return Given(p, q, b, torch.tensor([1]), one, one, low * one, high * one)


# logits of a token at the policy, the sampler and the base: the weight that it has by "clamp" and by "zero"
WEIGHTS = [
    ((0.0, 0.0, -INFINITY), 2.0, 0.0),  # the base alone: the largest ratio
    ((0.0, 0.0, -1e30), 2.0, 0.0),
    ((-INFINITY, 0.0, 0.0), 0.5, 0.0),  # the policy alone: +0
    ((-1e30, 0.0, 0.0), 0.5, 0.0),
    ((-INFINITY, 0.0, -INFINITY), 1.0, 1.0),  # both: one
]


@pytest.mark.parametrize("logits, clamped, zeroed", WEIGHTS)
def test_a_dead_token_of_the_base_or_the_policy_has_the_weight_that_is_written(
    everyone: list[Kernels], logits: tuple[float, float, float], clamped: float, zeroed: float
) -> None:
    one = dead_somewhere(*logits, low=0.5, high=2.0)
    for outside, weight in (("clamp", clamped), ("zero", zeroed)):
        chosen = replace(one, ids=torch.tensor([0]))  # then w_a is that token's
        d, w_id, total = agreed(everyone, chosen, outside)
        assert_same_bits(w_id, torch.tensor([weight]))
        assert d.isfinite().all() and total.isfinite().all()


def test_a_ratio_without_an_upper_bound_stays_finite(everyone: list[Kernels]) -> None:
    one = dead_somewhere(0.0, -30.0, -INFINITY, low=0.0, high=INFINITY)
    for outside in OUTSIDE:
        d, _, total = agreed(everyone, one, outside)
        assert d.isfinite().all() and total.isfinite().all() and total > 1e20
    one = replace(one, ids=torch.tensor([0]))
    _, w_id, _ = agreed(everyone, one)
    assert_same_bits(w_id, float32.exp(torch.tensor([float32.EXP_HIGHEST])))


@pytest.mark.parametrize("outside", OUTSIDE)
def test_extreme_logits_are_finite(everyone: list[Kernels], outside: str) -> None:
    one = given(129, scale=1.0).each(lambda x: x + 80.0 * normal(*x.shape, seed=9).sign())
    one = replace(one, sampler=-one.sampler)  # and the sampler likes what the others do not
    d, w_id, total = agreed(everyone, one, outside)
    assert d.isfinite().all() and w_id.isfinite().all() and total.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, INFINITY, 0.0])
def test_a_row_that_no_gradient_reaches_is_zero_whatever_its_logits(
    everyone: list[Kernels], bad: float, dtype: torch.dtype
) -> None:
    one = given(129)
    one.d_logprob[2], one.d_logprob[4] = -0.0, 0.0
    for matrix in (one.policy, one.sampler, one.base):
        assert matrix is not None
        matrix[2, 77] = bad
    for base in (one.base, None):
        d, _, _ = agreed(everyone, replace(one, base=base), dtype=dtype)
        assert_same_bits(d[[2, 4]], torch.zeros(2, 129, dtype=grad_dtype(dtype)))
        assert d.isfinite().all()


@pytest.mark.parametrize("name", ["policy", "sampler", "base"])
@pytest.mark.parametrize("bad", [torch.nan, INFINITY])
def test_a_logit_that_is_not_finite_shows(everyone: list[Kernels], name: str, bad: float) -> None:
    one = given(129)
    getattr(one, name)[2, 77] = bad
    for outside in OUTSIDE:
        d, _, total = agreed(everyone, one, outside)
        assert d[2].isnan().any() and total[2].isnan()
        assert d[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels]) -> None:
    one = given(129, scale=30.0)
    one.d_logprob[1] = 2.0**-130
    expected = centred(Reference(), one)
    for kernels in compiled:
        with flushing_denormals():
            actual = centred(kernels, one)
        assert_same_bits(actual, expected, kernels.name)


def test_what_does_not_go_together_is_refused(everyone: list[Kernels]) -> None:
    one, ones = given(33), torch.ones(len(TEMPERATURES))
    for kernels in everyone:
        p = softmax(kernels, one.policy, one)

        def call(
            base: Softmax | None,
            low: Tensor | None,
            high: Tensor | None,
            outside: str,
            k: Kernels = kernels,
            p: Softmax = p,
        ) -> object:
            return k.centre(p, p, base, one.ids, one.temperature, one.d_logprob, low, high, outside, torch.float32)

        with pytest.raises(ValueError, match=r"outside is 'truncate': .* clamp or zero"):
            call(p, ones, ones, "truncate")
        with pytest.raises(ValueError, match="the bound high and no base"):
            call(None, None, ones, "clamp")
        with pytest.raises(ValueError, match="needs both bounds"):
            call(p, ones, None, "clamp")
    for kernels in everyone[1:]:
        p = softmax(kernels, one.policy, one)
        narrow = Softmax(one.policy[:, :5], p.max, p.sum)
        with pytest.raises(ValueError, match=r"the base's logits is .* needed is"):
            kernels.centre(p, p, narrow, one.ids, one.temperature, ones, ones, ones, "clamp", torch.float32)
        with pytest.raises(IndexError, match="token id 33 is outside 0 … 32"):
            kernels.centre(p, p, p, one.ids * 0 + 33, one.temperature, ones, ones, ones, "clamp", torch.float32)
