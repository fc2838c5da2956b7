"""logprob and entropy under the tempered distribution, and their gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helpers import LAYOUTS, Layout, agree, assert_same_bits, flushing_denormals, normal
from memory import far_rows
from vexact_kernels.contract import DTYPES, Kernels, grad_dtype
from vexact_kernels.reference import Reference

SIZES = [1, 3, 31, 33, 127, 129, 1000, 1025]
TEMPERATURES = [1.0, 0.0, 0.6, 1.7, 0.0, 1e-3, 1.0]


def inputs(
    vocabulary: int, scale: float = 4.0, temperatures: Sequence[float] = TEMPERATURES
) -> tuple[Tensor, Tensor, Tensor]:
    n = len(temperatures)
    ids = torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(1))
    return normal(n, vocabulary, scale=scale), ids, torch.tensor(temperatures)


def forward_and_backward(
    kernels: Kernels, logits: Tensor, ids: Tensor, temperature: Tensor, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    logprob, entropy, max_, sum_, finite = kernels.logprob(logits, ids, temperature)
    assert entropy is not None
    d_logprob, d_entropy = normal(len(ids), seed=3), normal(len(ids), seed=4)
    given = (logits, ids, temperature, max_, sum_)
    return [
        logprob, entropy, max_, sum_, finite,
        kernels.logprob_backward(*given, None, d_logprob, None, dtype),
        kernels.logprob_backward(*given, entropy, d_logprob, d_entropy, dtype),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_all_implementations_agree(everyone: list[Kernels], vocabulary: int, dtype: torch.dtype) -> None:
    given = inputs(vocabulary)
    results = agree(lambda k: forward_and_backward(k, *given, dtype), everyone)
    assert results[-1].dtype == grad_dtype(dtype)
    assert results[4].all()


def test_a_vocabulary_of_151936_agrees(everyone: list[Kernels]) -> None:
    given = inputs(151_936, temperatures=[0.6, 1.0])
    agree(lambda k: forward_and_backward(k, *given, torch.bfloat16), everyone)


def test_generating_and_scoring_a_vocabulary_of_151936_agree(compiled: list[Kernels]) -> None:
    """One row a step of what is drawn, against all rows at once with their entropy."""
    logits = normal(5, 151_936, scale=3.0)
    temperature, where = torch.tensor([1.0, 0.6, 0.0, 1.7, 1.0]), torch.arange(5)
    for kernels in compiled:
        ids, generated = [], []
        for i in range(5):
            row, one = logits[i : i + 1], where[i : i + 1]
            drawn = kernels.draw(row, temperature[i : i + 1], one, one, one, one)
            ids.append(drawn)
            generated.append(kernels.logprob(row, drawn, temperature[i : i + 1], entropy=False)[0])
        scored = kernels.logprob(logits, torch.cat(ids), temperature)[0]
        assert_same_bits(torch.cat(generated), scored, kernels.name)
        assert_same_bits(kernels.draw(logits, temperature, where, where, where, where), torch.cat(ids), kernels.name)


def test_rows_may_lie_further_apart_than_two_to_the_31_elements(compiled: list[Kernels]) -> None:
    logits, ids, temperature = inputs(33, temperatures=[1.0, 0.7])
    expected = forward_and_backward(Reference(), logits, ids, temperature)
    actual = forward_and_backward(compiled[-1], far_rows(logits), ids, temperature)
    assert_same_bits(actual, expected)


def test_without_entropy_nothing_else_changes(everyone: list[Kernels]) -> None:
    logits, ids, temperature = inputs(129)
    for kernels in everyone:
        with_it, without = (kernels.logprob(logits, ids, temperature, entropy=e) for e in (True, False))
        assert without[1] is None
        assert_same_bits([without[0], *without[2:]], [with_it[0], *with_it[2:]], kernels.name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout) -> None:
    logits, ids, temperature = inputs(129)
    expected = forward_and_backward(everyone[0], logits, ids, temperature)
    for kernels in everyone:
        assert_same_bits(forward_and_backward(kernels, layout(logits), ids, temperature), expected, kernels.name)


def test_a_view_of_a_padded_vocabulary_never_counts_the_padding(compiled: list[Kernels]) -> None:
    padded = normal(192, 1024, scale=4.0)
    padded[:, 1000:] = 1e9
    ids, temperature = torch.arange(192), torch.ones(192)
    for kernels in compiled:
        view = forward_and_backward(kernels, padded[:, :1000], ids, temperature)
        assert_same_bits(view, forward_and_backward(kernels, padded[:, :1000].contiguous(), ids, temperature))


def test_a_row_does_not_know_its_batch(everyone: list[Kernels]) -> None:
    logits, ids, temperature = inputs(129)
    expected = forward_and_backward(everyone[0], logits, ids, temperature)
    logits[::2] = torch.nan
    for kernels in everyone:
        actual = forward_and_backward(kernels, logits, ids, temperature)
        assert_same_bits([t[1::2] for t in actual], [t[1::2] for t in expected], kernels.name)
        assert actual[4].tolist() == [False, True] * 3 + [False]
        one = kernels.logprob(logits[3:4], ids[3:4], temperature[3:4])
        assert_same_bits([t[0] for t in one if t is not None], [t[3] for t in expected[:5]], kernels.name)


def test_a_temperature_of_zero_or_one_leaves_the_logits_as_they_are(everyone: list[Kernels]) -> None:
    logits, ids, _ = inputs(33)
    one, zero = torch.ones(len(ids)), torch.zeros(len(ids))
    for kernels in everyone:
        expected = forward_and_backward(kernels, logits, ids, one)
        assert_same_bits(forward_and_backward(kernels, logits, ids, zero), expected, kernels.name)


def test_a_tiny_temperature_is_finite(everyone: list[Kernels]) -> None:
    logits, ids, _ = inputs(33)
    results = agree(lambda k: forward_and_backward(k, logits, ids, torch.full((len(ids),), 1e-7)), everyone)
    assert all(t.isfinite().all() for t in results[:4])


INFINITY = torch.inf
CERTAIN = [
    ([1e4, 0.0], 0.0, 0.0),
    ([0.0, -INFINITY], 0.0, 0.0),
    ([65504.0, -65504.0], 0.0, 0.0),
    ([0.0, 0.0, -INFINITY], -math.log(2.0), math.log(2.0)),
]


@pytest.mark.parametrize("row, logprob, entropy", CERTAIN)
def test_dead_entries_give_zero_and_no_nan(
    everyone: list[Kernels], row: list[float], logprob: float, entropy: float
) -> None:
    logits, ids, temperature = torch.tensor([row]), torch.tensor([0]), torch.ones(1)
    results = agree(lambda k: forward_and_backward(k, logits, ids, temperature), everyone)
    assert_same_bits(results[0], torch.tensor([logprob]))
    assert_same_bits(results[1], torch.tensor([entropy]))
    for gradient in results[5:]:
        assert gradient.isfinite().all()
        assert gradient[0, -1].item() == 0.0


def test_a_dead_token_that_was_chosen_keeps_its_gradient(everyone: list[Kernels]) -> None:
    logits, ids, temperature = torch.tensor([[0.0, -INFINITY, 1.0]]), torch.tensor([1]), torch.ones(1)
    results = agree(lambda k: forward_and_backward(k, logits, ids, temperature), everyone)
    assert results[0].item() == -math.inf
    d_logprob = normal(1, seed=3)
    for gradient in results[5:]:
        assert_same_bits(gradient[0, 1], d_logprob[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 16, 128])
def test_a_logit_that_is_not_finite_is_reported(everyone: list[Kernels], bad: float, place: int) -> None:
    logits, ids, temperature = inputs(129)
    logits[2, place] = bad
    results = agree(lambda k: forward_and_backward(k, logits, ids, temperature), everyone)
    assert results[4].tolist() == [True, True, False, *[True] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_no_gradient_reaches_is_zero_whatever_its_logits(
    everyone: list[Kernels], bad: float, dtype: torch.dtype
) -> None:
    logits, ids, temperature = inputs(129)
    logits[2, 77] = bad
    d_logprob, d_entropy = normal(len(ids), seed=3), normal(len(ids), seed=4)
    d_logprob[2], d_entropy[2] = -0.0, 0.0

    def both(kernels: Kernels) -> list[Tensor]:
        _, entropy, max_, sum_, _ = kernels.logprob(logits, ids, temperature)
        given = (logits, ids, temperature, max_, sum_, entropy, d_logprob)
        return [kernels.logprob_backward(*given, d, dtype) for d in (None, d_entropy)]

    for gradient in agree(both, everyone):
        assert_same_bits(gradient[2], torch.zeros(129, dtype=grad_dtype(dtype)))
        assert gradient.isfinite().all()


def test_a_row_that_is_dead_or_overflows_is_reported(everyone: list[Kernels]) -> None:
    logits, temperature = torch.tensor([[-torch.inf, -torch.inf], [1e35, 0.0], [1e35, 0.0]]), torch.tensor([1, 1e-7, 1])
    results = agree(lambda k: k.logprob(logits, torch.zeros(3, dtype=torch.int64), temperature), everyone)
    assert results[4].tolist() == [False, False, True]


def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels]) -> None:
    logits, ids, temperature = inputs(129, scale=30.0)
    logits[0] *= 2.0**-140
    logits[1] *= 2.0**-130
    expected = forward_and_backward(Reference(), logits, ids, temperature)
    for kernels in compiled:
        with flushing_denormals():
            actual = forward_and_backward(kernels, logits, ids, temperature)
        assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("vocabulary", [33, 1000, 151_936])
def test_values_and_gradients_against_float64(compiled: list[Kernels], vocabulary: int) -> None:
    # z, z - M and the difference to log Z round once each, at half an ulp of up to 64; so do p and its weights
    logits, ids, _ = inputs(vocabulary)
    temperature = torch.tensor([1.0, 0.6, 1.7, 1.0, 2.0, 0.5, 1.0])
    results = forward_and_backward(compiled[-1], logits, ids, temperature)
    z = logits.double().requires_grad_()
    log_p = (z / temperature.double()[:, None]).log_softmax(-1)
    logprob, entropy = log_p[torch.arange(len(ids)), ids], -(log_p.exp() * log_p).sum(-1)
    assert (results[0].double() - logprob).abs().max() <= 2.0**-17
    assert (results[1].double() - entropy).abs().max() <= 2.0**-17
    d_logprob, d_entropy = normal(len(ids), seed=3).double(), normal(len(ids), seed=4).double()
    (plain,) = torch.autograd.grad(logprob @ d_logprob, z, retain_graph=True)
    (both,) = torch.autograd.grad(logprob @ d_logprob + entropy @ d_entropy, z)
    assert (results[5].double() - plain).abs().max() <= 2.0**-18 * plain.abs().max()
    assert (results[6].double() - both).abs().max() <= 2.0**-18 * both.abs().max()
