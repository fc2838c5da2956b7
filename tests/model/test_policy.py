"""One forward: a log-probability does not know how its sequence was cut, packed, laid out in memory or threaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vexact.model.batch import Batch, Chunk
from vexact.model.gradients import Gradients
from vexact.model.pages import Pages, pages_for
from vexact.model.parameters import stack
from vexact.model.policy import Policy, Scored, micro_batches
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact_kernels import load

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"head_dim": 16, "hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1,
              "tie_word_embeddings": False, "vocab_size": 1000},
    "llama": {"head_dim": 16, "tie_word_embeddings": False, "max_position_embeddings": 512,
              "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
}  # fmt: skip
LENGTHS = (5, 17, 33, 64, 65, 127, 128, 200)


def make(family: str, dtype: torch.dtype) -> Policy:
    config = tiny_config(family, **FAMILIES[family])
    weights = tiny_weights(config)
    return Policy.build(config, lambda name: stack(config, weights, name), load("cpu"), dtype)


@pytest.fixture(
    scope="module",
    params=[(family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16, torch.float16)],
    ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}",
)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make(*request.param)


def sequence(length: int, first: int = 1) -> Scored:
    return Scored([(i * 29 + length) % 256 for i in range(length)], first)


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).flatten().tolist()


def hidden_in_chunks(policy: Policy, tokens: list[int], chunk: int, shuffle: bool = False, fill: float = 0.0) -> Tensor:
    """Hidden states of a sequence computed in chunks over one pool of pages."""
    count = pages_for(len(tokens))
    pages = Pages(policy.config, count + 3, policy.dtype)
    pages.fill(fill)
    table = pages.take(count + 3)[::-1] if shuffle else pages.take(count)
    parts = [
        policy.transformer.forward(Batch.of([Chunk(tokens[i : i + chunk], i, table)]), pages, policy.ops)
        for i in range(0, len(tokens), chunk)
    ]
    return torch.cat(parts)


def test_the_cut_into_chunks_changes_no_bit(policy: Policy) -> None:
    tokens = list(sequence(150).tokens)
    whole = bits(hidden_in_chunks(policy, tokens, len(tokens)))
    for chunk in (1, 7, 16, 64, 100):
        assert bits(hidden_in_chunks(policy, tokens, chunk)) == whole


@pytest.mark.parametrize("fill", [float("nan"), 1e4])
def test_pages_may_lie_anywhere_and_hold_anything(policy: Policy, fill: float) -> None:
    tokens = list(sequence(150).tokens)
    expected = bits(hidden_in_chunks(policy, tokens, 16))
    assert bits(hidden_in_chunks(policy, tokens, 16, shuffle=True, fill=fill)) == expected


def test_packing_and_order_change_no_bit(policy: Policy) -> None:
    sequences = [sequence(length) for length in LENGTHS]
    alone = {s.tokens[0]: bits(policy.logprobs([s]).logprob) for s in sequences}
    for order in (sequences, sequences[::-1], sequences[3:] + sequences[:3]):
        for tokens_at_once in (1, 70, 300, 10_000):
            got = policy.logprobs(order, tokens_at_once).logprob
            assert bits(got) == [bit for s in order for bit in alone[s.tokens[0]]]


def test_threads_change_no_bit(policy: Policy) -> None:
    sequences = [sequence(length) for length in LENGTHS]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(bits(policy.logprobs(sequences).logprob))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_a_huge_neighbour_changes_no_bit(policy: Policy) -> None:
    batch = policy.logprobs([sequence(40), sequence(64)]).logprob
    assert bits(batch[:39]) == bits(policy.logprobs([sequence(40)]).logprob)


def gradients(policy: Policy, sequences: list[Scored], tokens_at_once: int) -> dict[str, Tensor]:
    sums = Gradients(policy.config, policy.ops.kernels)
    for rows, result in policy.gradient_passes(sequences, sums, tokens_at_once):
        weights = torch.linspace(-1, 1, 1000, dtype=torch.float32)[torch.arange(rows.start, rows.stop) % 1000]
        ((result.logprob * weights).sum() + 0.1 * result.entropy.sum()).backward()
    return sums.totals()


def test_gradients_do_not_know_their_micro_batch(policy: Policy) -> None:
    sequences = [sequence(length, first) for length, first in zip(LENGTHS, (1, 4, 30, 9, 64, 100, 1, 150), strict=True)]
    sequences += [sequence(11, 3), sequence(9, 8)]
    whole = gradients(policy, sequences, 100_000)
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in whole.values())
    for tokens_at_once in (1, 100, 333):
        for name, gradient in gradients(policy, sequences, tokens_at_once).items():
            assert bits(gradient) == bits(whole[name]), name


def test_the_recorded_forward_is_the_scoring_forward(policy: Policy) -> None:
    sequences = [sequence(length) for length in LENGTHS]
    scored = policy.logprobs(sequences)
    sums = Gradients(policy.config, policy.ops.kernels)
    parts = []
    for _, result in policy.gradient_passes(sequences, sums, 200):
        parts.append(result.logprob.detach())
        result.logprob.sum().backward()
    assert bits(torch.cat(parts)) == bits(scored.logprob)


def test_flush_denormal_in_the_caller_changes_no_bit(policy: Policy) -> None:
    sequences = [sequence(40), sequence(70)]
    expected = (
        bits(policy.logprobs(sequences).logprob),
        {n: bits(g) for n, g in gradients(policy, sequences, 50).items()},
    )
    try:
        torch.set_flush_denormal(True)
        got = (
            bits(policy.logprobs(sequences).logprob),
            {n: bits(g) for n, g in gradients(policy, sequences, 50).items()},
        )
    finally:
        torch.set_flush_denormal(False)
    assert got == expected


def test_a_packed_sequence_ends_where_it_ends() -> None:
    """[10, 11, 12] and [20, 21]: three values, none of them the first token of a neighbour."""
    policy = make("qwen3", torch.float32)
    first, second = Scored([10, 11, 12], 1), Scored([20, 21], 1)
    together = bits(policy.logprobs([first, second]).logprob)
    assert len(together) == 3
    assert together == bits(policy.logprobs([first]).logprob) + bits(policy.logprobs([second]).logprob)
    assert bits(policy.logprobs([Scored([10, 11, 12, 13], 2)]).logprob[:1]) == together[1:2]


@pytest.mark.parametrize("family", ["qwen3", "llama"], ids=["tied", "untied"])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_head_may_be_taken_in_parts(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sequences = make(family, torch.bfloat16), [sequence(30, 2), sequence(41, 7), sequence(5, 1)]
    scored, whole = bits(policy.logprobs(sequences).logprob), gradients(policy, sequences, 1000)
    monkeypatch.setattr("vexact.model.ops.LOGITS_AT_ONCE", rows * policy.config.vocab_size)
    assert bits(policy.logprobs(sequences).logprob) == scored
    for name, gradient in gradients(policy, sequences, 1000).items():
        assert bits(gradient) == bits(whole[name]), name


def test_a_vocabulary_of_qwens_size() -> None:
    config = tiny_config(vocab_size=151_936)
    weights = tiny_weights(config)
    policy = Policy.build(config, lambda name: stack(config, weights, name), load("cpu"), torch.bfloat16)
    sampler = Sampler(policy)
    rollouts = sampler.run([Request(i, [3, 1, 4], n=2, max_tokens=5) for i in range(3)])
    scored = policy.logprobs([Scored(r.tokens, 3) for r in rollouts])
    assert bits(torch.cat([r.logprobs for r in rollouts])) == bits(scored.logprob)


def test_micro_batches_hold_at_least_one_sequence() -> None:
    sequences = [sequence(length) for length in LENGTHS]
    assert micro_batches(sequences, 1) == [(i, i + 1) for i in range(8)]
    assert micro_batches(sequences, 60) == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
    assert micro_batches([], 10) == []


def test_positions_and_ids_beyond_the_model_are_refused() -> None:
    policy = make("llama", torch.float32)
    with pytest.raises(ValueError, match="position 512 is beyond max_position_embeddings 512"):
        policy.logprobs([Scored([1] * 514, 1)])
    with pytest.raises(IndexError, match="320"):
        policy.logprobs([Scored([1, 320, 2], 1)])
    with pytest.raises(ValueError, match="first scored token 0"):
        Scored([1, 2], 0)


@pytest.mark.parametrize("ambient", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_dtype_is_no_part_of_it(ambient: torch.dtype) -> None:
    sequences = [sequence(20), sequence(31, 5)]
    policy = make("qwen3", torch.float32)
    expected = (
        bits(policy.logprobs(sequences).logprob),
        {n: bits(g) for n, g in gradients(policy, sequences, 25).items()},
    )
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(ambient)
        again = make("qwen3", torch.float32)
        rollouts = Sampler(again).run([Request(1, [1, 2, 3], max_tokens=4)])
        got = bits(again.logprobs(sequences).logprob), {n: bits(g) for n, g in gradients(again, sequences, 25).items()}
    finally:
        torch.set_default_dtype(before)
    assert got == expected and rollouts[0].logprobs.dtype == torch.float32
