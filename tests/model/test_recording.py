"""Gradients are mathematics, not only bits: every parameter's agrees with transformers' autograd in fp32.

The bound: relative to the largest entry of a tensor's gradient, two fp32 backward passes of these models differ by less
than 1e-4 (sums of a few hundred terms in other orders, measured 1e-6 to 3e-5); a missing term moves more than 1e-2.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import FAMILIES, build
from helpers import assert_same_bits
from vexact.model.gradients import Gradients
from vexact.model.parameters import unstack
from vexact.model.policy import Policy, Scored
from vexact.model.recording import Tape
from vexact_kernels import load

LENGTHS, TEMPERATURE = (5, 33, 64, 90), 1.3


def sequences() -> list[Scored]:
    return [Scored([(i * 31 + n) % 250 for i in range(n)], 1 + n // 3, TEMPERATURE) for n in LENGTHS]


def weight_of(index: int) -> float:
    return 1.0 if index % 3 else -0.5


def our_gradients(policy: Policy) -> dict[str, Tensor]:
    sums = Gradients(policy.config, policy.ops.kernels)
    for rows, result in policy.gradient_passes(sequences(), sums, 120):
        weights = torch.tensor([weight_of(i) for i in range(rows.start, rows.stop)])
        ((result.logprob + 0.25 * result.entropy) * weights).sum().backward()
    return unstack(policy.config, sums.totals())


def their_gradients(folder: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    index, loss = 0, torch.zeros(())
    for sequence in sequences():
        logits = model(torch.tensor([list(sequence.tokens)])).logits[0]
        logp = torch.log_softmax(logits / TEMPERATURE, -1)
        for position in range(sequence.first, len(sequence.tokens)):
            row = logp[position - 1]
            loss = loss + weight_of(index) * (row[sequence.tokens[position]] - 0.25 * (row.exp() * row).sum())
            index += 1
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_gradient_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    folder = build(tmp_path / family, FAMILIES[family](dtype="float32"))
    ours = our_gradients(Policy.load(folder, load("cpu"), torch.float32))
    theirs = their_gradients(folder)
    assert set(ours) == set(theirs)
    for key, expected in theirs.items():
        assert expected.abs().max() > 0, key
        assert (ours[key] - expected).abs().max() < 1e-4 * expected.abs().max(), key


def test_half_precision_gradients_follow_the_float32_ones(tmp_path: Path) -> None:
    folder = build(tmp_path / "q3", FAMILIES["qwen3"](dtype="float32"))
    exact = our_gradients(Policy.load(folder, load("cpu"), torch.float32))
    for dtype in (torch.bfloat16, torch.float16):
        rounded = our_gradients(Policy.load(folder, load("cpu"), dtype))
        for key, expected in exact.items():
            cosine = torch.nn.functional.cosine_similarity(rounded[key].flatten(), expected.flatten(), dim=0)
            assert cosine > 0.98, (key, dtype)  # 8 bits of mantissa through two layers; a wrong term gives far less


def test_a_gradient_has_one_place_to_wait() -> None:
    tape, tensor = Tape(), torch.zeros(2)
    tape.give(tensor, torch.ones(2))
    with pytest.raises(RuntimeError, match="already waiting"):
        tape.give(tensor, torch.ones(2))
    assert tape.take(tensor) is not None and tape.take(tensor) is None
    with pytest.raises(RuntimeError, match="no gradient reached"):
        tape.need(tensor)


def test_a_micro_batch_goes_back_once() -> None:
    """A second backward would find an empty tape, and its gradient would be lost in silence."""
    policy = Policy.load("tiny", load("cpu"), torch.bfloat16)
    sums = Gradients(policy.config, policy.ops.kernels)
    ((_, result),) = policy.gradient_passes([Scored([1, 2, 3, 4], 1)], sums)
    result.logprob.sum().backward()
    with pytest.raises(RuntimeError, match="gone back already"):
        result.entropy.sum().backward()


def test_a_batch_without_lanes_or_a_missing_pass_is_refused() -> None:
    policy = Policy.load("tiny", load("cpu"), torch.float32)
    sums = Gradients(policy.config, policy.ops.kernels)
    with pytest.raises(RuntimeError, match="no gradient reached"):
        sums.totals()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_that_are_computed_again_give_the_same_gradients(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = Policy.load(build(tmp_path / family, FAMILIES[family](dtype="float32")), load("cpu"), dtype)
    kept, again = (Gradients(policy.config, policy.ops.kernels) for _ in range(2))
    for sums, recompute in ((kept, False), (again, True)):
        for _, result in policy.gradient_passes(sequences(), sums, 120, recompute=recompute):
            torch.autograd.backward([result.logprob, result.entropy], [torch.ones_like(result.logprob)] * 2)
    for name, gradient in kept.totals().items():
        assert_same_bits(again.totals()[name], gradient, name)
