"""Samples do not know their batch, their schedule or their memory; and what they record is what scoring computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from vexact.model.batch import Batch, Chunk
from vexact.model.draws import Address, Draws
from vexact.model.pages import Pages
from vexact.model.parameters import stack
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact_kernels import load

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def policy(request: pytest.FixtureRequest) -> Policy:
    return Policy.load("tiny", load("cpu"), request.param)


@pytest.fixture(scope="module")
def float32_policy() -> Policy:
    return Policy.load("tiny", load("cpu"), torch.float32)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(index * 37 + salt * 101 + 11) % 250 for index in range(length)]


def bits(rollouts: Sequence[Rollout]) -> list[tuple[object, ...]]:
    return [
        (r.id, tuple(r.completion), tuple(r.logprobs.view(torch.int32).tolist()), r.finish, r.version, r.digest)
        for r in rollouts
    ]


def rescored(policy: Policy, rollouts: Sequence[Rollout]) -> list[int]:
    result = policy.logprobs([Scored(r.tokens, len(r.prompt), r.temperature) for r in rollouts])
    return result.logprob.view(torch.int32).tolist()


def recorded(rollouts: Sequence[Rollout]) -> list[int]:
    return [bit for r in rollouts for bit in r.logprobs.view(torch.int32).tolist()]


REQUESTS = [
    Request(index, prompt(length, index), n=n, temperature=t, seed=7, max_tokens=20)
    for index, (length, n, t) in enumerate(
        [(3, 1, 1.0), (64, 2, 0.6), (65, 3, 1.7), (12, 4, 1.0), (129, 1, 0.0), (200, 2, 1.0), (63, 1, 1e-7)]
    )
]


def test_what_is_recorded_is_what_scoring_computes(policy: Policy) -> None:
    rollouts = Sampler(policy).run(REQUESTS)
    assert len(rollouts) == 14 and len(recorded(rollouts)) == 14 * 20
    assert recorded(rollouts) == rescored(policy, rollouts)


@pytest.mark.parametrize(
    "schedule",
    [
        {"running": 1},
        {"chunk": 1, "tokens_per_step": 5},
        {"chunk": 7},
        {"chunk": 64, "running": 3},
        {"tokens_per_step": 1},
        {"pages": 8, "running": 3},
    ],
    ids=str,
)
def test_the_schedule_changes_no_bit(float32_policy: Policy, schedule: dict[str, int]) -> None:
    expected = bits(Sampler(float32_policy).run(REQUESTS))
    sampler = Sampler(float32_policy, **schedule)
    assert bits(sampler.run(REQUESTS)) == expected
    assert sampler.pages.free == sampler.pages.count


def test_a_sequence_that_lost_its_pages_goes_on_with_the_same_bits(float32_policy: Policy) -> None:
    requests = [Request(i, prompt(20, i), temperature=t, max_tokens=60) for i, t in enumerate([0.0, 1.0, 1.0, 0.7])]
    ample, tight = Sampler(float32_policy), Sampler(float32_policy, pages=3, chunk=16)
    assert bits(tight.run(requests)) == bits(ample.run(requests))
    assert tight.scheduler.preemptions > 0 == ample.scheduler.preemptions
    assert tight.pages.free == 3


def test_order_and_batch_mates_change_no_bit(policy: Policy) -> None:
    together = bits(Sampler(policy).run(REQUESTS))
    assert bits(Sampler(policy).run(REQUESTS[::-1])) == together
    alone = [line for request in REQUESTS for line in bits(Sampler(policy).run([request]))]
    assert alone == together


def test_requests_may_join_at_any_step(float32_policy: Policy) -> None:
    expected = bits(Sampler(float32_policy).run(REQUESTS))
    sampler = Sampler(float32_policy)
    rollouts: list[Rollout] = []
    for request in REQUESTS:
        sampler.add(request)
        rollouts.extend(sampler.step())
    rollouts.extend(sampler.run([]))
    assert bits(sorted(rollouts, key=lambda r: r.id)) == expected


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_what_lay_in_memory_before_changes_no_bit(float32_policy: Policy, value: float) -> None:
    clean = Sampler(float32_policy)
    clean.pages.fill(0.0)
    dirty = Sampler(float32_policy)
    dirty.pages.fill(value)
    assert bits(dirty.run(REQUESTS)) == bits(clean.run(REQUESTS))


def test_samples_of_a_prompt_share_its_pages_and_differ(policy: Policy) -> None:
    request = Request(3, prompt(130), n=8, seed=42, max_tokens=12)
    rollouts = Sampler(policy).run([request])
    assert [r.cached_tokens for r in rollouts] == [0] + [130] * 7
    assert len({tuple(r.completion) for r in rollouts}) == 8
    again = Sampler(policy, running=1).run([request])  # siblings compute the prompt themselves
    assert bits(again) == bits(rollouts)


def test_a_smaller_group_is_the_beginning_of_a_larger_one(float32_policy: Policy) -> None:
    request = Request(3, prompt(20), n=8, seed=42, max_tokens=6)
    eight = bits(Sampler(float32_policy).run([request]))
    assert bits(Sampler(float32_policy).run([replace(request, n=3)])) == eight[:3]


def test_another_seed_or_request_is_another_stream(float32_policy: Policy) -> None:
    base = Request(1, prompt(20), max_tokens=16)
    variants = [
        base,
        replace(base, seed=1),
        replace(base, id=2),
        replace(base, id=1 << 40),
        replace(base, seed=1 << 63),
    ]
    completions = {tuple(Sampler(float32_policy).run([v])[0].completion) for v in variants}
    assert len(completions) == len(variants)


def test_a_completion_ends_with_the_first_stop_id(float32_policy: Policy) -> None:
    free = Sampler(float32_policy).run([Request(1, prompt(9), max_tokens=30)])[0]
    stop = free.completion[10]
    first = list(free.completion).index(stop)
    (stopped,) = Sampler(float32_policy).run([Request(1, prompt(9), max_tokens=30, stop_ids=frozenset({stop}))])
    assert stopped.finish == "stop" and list(stopped.completion) == list(free.completion[: first + 1])
    assert recorded([stopped]) == recorded([free])[: first + 1]
    assert free.finish == "length"


def test_greedy_takes_the_lowest_of_the_most_probable_ids(float32_policy: Policy) -> None:
    (rollout,) = Sampler(float32_policy).run([Request(1, prompt(5), temperature=0.0, max_tokens=8)])
    tokens = rollout.tokens
    for position in range(5, len(tokens)):
        every = float32_policy.logprobs([Scored([*tokens[:position], v], position) for v in range(320)]).logprob
        assert tokens[position] == int((every == every.max()).nonzero()[0])


def test_no_tokens_asked_is_an_empty_completion(float32_policy: Policy) -> None:
    rollouts = Sampler(float32_policy).run(
        [Request(1, prompt(5), n=2, max_tokens=0), Request(2, prompt(5), max_tokens=1)]
    )
    assert [(r.id, len(r.completion), len(r.logprobs), r.finish) for r in rollouts] == [
        ((1, 0), 0, 0, "length"),
        ((1, 1), 0, 0, "length"),
        ((2, 0), 1, 1, "length"),
    ]


def test_frequencies_are_those_of_the_distribution(float32_policy: Policy) -> None:
    draws = 4000
    rollouts = Sampler(float32_policy, running=256).run(
        [Request(i, prompt(4), n=400, temperature=1.3, seed=3, max_tokens=1) for i in range(draws // 400)]
    )
    counts = Counter(r.completion[0] for r in rollouts)
    logprob = float32_policy.logprobs([Scored([*prompt(4), v], 4, 1.3) for v in range(320)]).logprob
    expected = (logprob.double().exp() * draws).tolist()
    large = [v for v in range(320) if expected[v] >= 5]
    rest = draws - sum(expected[v] for v in large)
    chi = sum((counts[v] - expected[v]) ** 2 / expected[v] for v in large)
    chi += (sum(counts[v] for v in range(320) if v not in large) - rest) ** 2 / max(rest, 1e-9)
    degrees = len(large)
    # 99.99 % quantile by Wilson and Hilferty; the draws are fixed, so the test is, too
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert degrees > 1 and chi < bound


def test_a_sequence_whose_logits_are_not_finite_ends_alone() -> None:
    config = tiny_config(tie_word_embeddings=False)
    weights = tiny_weights(config)
    weights["model.embed_tokens.weight"][17] = float("inf")
    policy = Policy.build(config, lambda name: stack(config, weights, name), load("cpu"), torch.float32)
    healthy, sick = Request(1, [5, 6, 7], n=2, max_tokens=6), Request(2, [5, 17, 7], n=2, max_tokens=6)
    rollouts = Sampler(policy).run([healthy, sick])
    assert [r.finish for r in rollouts[2:]] == ["nonfinite", "nonfinite"]
    assert all(len(r.completion) == len(r.logprobs) == 0 for r in rollouts[2:])
    assert bits(rollouts[:2]) == bits(Sampler(policy).run([healthy]))


def test_other_weights_are_adopted_only_between_requests(float32_policy: Policy) -> None:
    newer = replace(float32_policy, version=1)
    sampler = Sampler(float32_policy)
    sampler.add(REQUESTS[0])
    sampler.step()
    with pytest.raises(RuntimeError, match="unfinished"):
        sampler.adopt(newer)
    sampler.run([])
    sampler.adopt(newer)
    assert {r.version for r in sampler.run(REQUESTS)} == {1}


def test_prompts_that_do_not_fit_are_refused(float32_policy: Policy) -> None:
    limit = float32_policy.config.max_positions
    sampler = Sampler(float32_policy, pages=4096)
    with pytest.raises(ValueError, match=f"exceed the model's {limit} positions"):
        sampler.add(Request(1, prompt(limit), max_tokens=1))
    with pytest.raises(ValueError, match="token id 320 is outside the vocabulary of 320"):
        sampler.add(Request(1, [320]))
    sampler.add(Request(1, prompt(limit), max_tokens=0))


def test_decoding_and_one_long_prompt_agree_at_every_position(policy: Policy) -> None:
    """Positions around the edges of registers, pages and usual tiles among them: 31-33, 63-65, 95-98, 127-129, 255."""
    requests = [Request(length, prompt(length), temperature=0.0, max_tokens=300 - length) for length in (3, 4, 12)]
    rollouts = Sampler(policy).run(requests)
    assert recorded(rollouts) == rescored(policy, rollouts)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100, 512])
def test_a_long_prompt_may_be_cut_anywhere(float32_policy: Policy, chunk: int) -> None:
    request = Request(1, prompt(600), n=2, max_tokens=4)
    expected = bits(Sampler(float32_policy, chunk=1000, tokens_per_step=1000).run([request]))
    assert bits(Sampler(float32_policy, chunk=chunk).run([request])) == expected


def test_ids_that_the_tokenizer_does_not_know_are_like_any_other(policy: Policy) -> None:
    """tiny has 320 ids of which bytes and specials are known; the rest can be drawn, fed back and scored."""
    rollouts = Sampler(policy).run([Request(i, prompt(5, i), temperature=2.0, max_tokens=100) for i in range(8)])
    assert any(token >= 259 for r in rollouts for token in r.completion)
    again = Sampler(policy).run([Request(50 + i, r.tokens, max_tokens=3) for i, r in enumerate(rollouts)])
    assert recorded(again) == rescored(policy, again)
    assert recorded(rollouts) == rescored(policy, rollouts)


def test_nobody_starves(float32_policy: Policy) -> None:
    """A long prompt among many short requests, few tokens a step: all finish, the long one before the queue is done."""
    sampler = Sampler(float32_policy, tokens_per_step=16, chunk=8, running=3)
    order: list[int] = []
    for request in [Request(0, prompt(200), max_tokens=2), *(Request(i, [i], max_tokens=6) for i in range(1, 40))]:
        sampler.add(request)
    while not sampler.scheduler.idle:
        order.extend(r.request for r in sampler.step())
    assert sorted(order) == list(range(40)) and order.index(0) < 30


def test_a_token_is_drawn_at_its_own_address(policy: Policy) -> None:
    """seed, request, sample and position of the contract: the sampler's token is the kernel's at that address."""
    request = Request(77, prompt(9), n=3, temperature=0.9, seed=1234, max_tokens=4)
    for rollout in Sampler(policy).run([request]):
        for position in range(9, 13):
            tokens = rollout.tokens[:position]
            pages = Pages(policy.config, 1, policy.dtype)
            hidden = policy.transformer.forward(Batch.of([Chunk(tokens, 0, pages.take(1))]), pages, policy.ops)
            draws = Draws.at([Address(1234, 77, rollout.sample, position, 0.9)])
            ids, _, _ = policy.ops.draw(policy.ops.logits(hidden[-1:], policy.transformer.head), draws)
            assert ids.tolist() == [rollout.tokens[position]]


def test_an_idle_sampler_has_nothing_to_do(float32_policy: Policy) -> None:
    assert Sampler(float32_policy).step() == []
