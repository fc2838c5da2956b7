"""The last part in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from caused import MIXED, REQUESTS, caused, exact, recorded, sampled, scored
from helpers import assert_same_bits, differing
from vexact.model.draws import Address, Draws
from vexact.study.causes.head import law, rounded
from vexact_kernels import load

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def hidden(dtype: torch.dtype, rows: int = 6) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(4)).to(dtype)


def some_logits(rows: int = 40) -> Tensor:
    return 4.0 * torch.randn(rows, 320, generator=torch.Generator().manual_seed(5))


def draws(temperatures: Tensor) -> Draws:
    return Draws.at([Address(1, i, 0, 5, t) for i, t in enumerate(temperatures.tolist())])


@dtypes
@pytest.mark.parametrize("cause", ["bf16-logits", "bf16-head"])
def test_logits_have_eight_digits(cause: str, dtype: torch.dtype) -> None:
    policy, head = exact(dtype), exact(dtype).transformer.head
    z = caused(cause, policy).ops.logits(hidden(dtype), head)
    assert_same_bits(z, rounded(load(), z))
    clean = policy.ops.logits(hidden(dtype), head)
    assert differing(z, clean) > 0  # a mutant: nothing is rounded
    assert (z - clean).abs().max() < 2**-6 * clean.abs().max()


def test_the_head_alone_is_rounded_where_the_rest_is_already() -> None:
    head = exact(torch.bfloat16).transformer.head
    one, other = (caused(cause, exact(torch.bfloat16)).ops for cause in ("bf16-head", "bf16-logits"))
    assert_same_bits(one.logits(hidden(torch.bfloat16), head), other.logits(hidden(torch.bfloat16), head))
    head = exact().transformer.head
    one, other = (caused(cause, exact()).ops for cause in ("bf16-head", "bf16-logits"))
    assert differing(one.logits(hidden(torch.float32), head), other.logits(hidden(torch.float32), head)) > 0


def test_rounded_logits_are_not_rounded_again() -> None:
    """The exact engine on logits that are bfloat16 already."""
    policy = caused("bf16-logits", exact())
    z = policy.ops.logits(hidden(torch.float32), policy.transformer.head)
    assert_same_bits(rounded(load(), z), z)
    rollouts = sampled(exact(), [replace(request, temperature=1.0) for request in REQUESTS])
    ids = torch.tensor([token for rollout in rollouts for token in rollout.completion])
    (raw,) = policy.logits([rollout.scored for rollout in rollouts])
    expected = load().logprob(raw, ids, torch.ones(len(ids)))[0]
    assert_same_bits(scored(policy, rollouts), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_probabilities_have_eight_digits_and_sum_to_one_again(temperature: float) -> None:
    z, t = some_logits(), torch.full((40,), temperature)
    ops, kernels = caused("bf16-softmax", exact()).ops, load()
    narrow = rounded(kernels, law(kernels, z, t))
    expected = narrow.double() / narrow.double().sum(dim=1, keepdim=True)
    ids, logprob, finite = ops.draw(z, draws(t))
    assert finite.all()
    found = logprob.double().exp()
    assert ((found / expected.gather(1, ids[:, None])[:, 0]) - 1).abs().max() < 3e-6
    clean = (z / temperature).double().softmax(1).gather(1, ids[:, None])[:, 0]
    assert (found / clean - 1).abs().max() > 1e-4  # a mutant: the probabilities that were not rounded


def test_what_is_rounded_to_nothing_is_never_drawn() -> None:
    z = torch.full((200, 320), -200.0)
    z[:, :2] = torch.tensor([0.0, 0.1])
    ids, _, finite = caused("bf16-softmax", exact()).ops.draw(z, draws(torch.ones(200)))
    assert finite.all() and set(ids.tolist()) == {0, 1}


def test_greedy_takes_the_greatest_that_is_left() -> None:
    z = some_logits()
    ids, _, _ = caused("bf16-softmax", exact()).ops.draw(z, draws(torch.zeros(40)))
    p = rounded(load(), law(load(), z, torch.zeros(40)))
    assert (p.gather(1, ids[:, None])[:, 0] == p.amax(1)).all()


def test_a_row_that_is_not_finite_is_found_out() -> None:
    z = some_logits()
    z[3, 7] = torch.nan
    _, _, finite = caused("bf16-softmax", exact()).ops.draw(z, draws(torch.ones(40)))
    assert finite.tolist() == [row != 3 for row in range(40)]


@pytest.mark.parametrize("cause", ["bf16-logits", "bf16-head", "bf16-softmax"])
def test_scoring_by_parts_of_rows_finds_the_same(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row at its own temperature."""
    policy = caused(cause, exact())
    rollouts = sampled(policy, MIXED)
    monkeypatch.setattr("vexact.model.ops.LOGITS_AT_ONCE", 7 * 320)
    assert_same_bits(scored(policy, rollouts), recorded(rollouts))
