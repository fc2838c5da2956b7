"""The schedule hands out chunks and pages; it loses none and starves nobody."""

from __future__ import annotations

import pytest
import torch

from vexact.model.pages import Pages
from vexact.model.tiny import tiny_config
from vexact.rollout.request import Request
from vexact.rollout.scheduler import Scheduler
from vexact_kernels import PAGE


def scheduler(pages: int, tokens_per_step: int = 128, chunk: int = 64, running: int = 8) -> Scheduler:
    return Scheduler(Pages(tiny_config(), pages, torch.float32), tokens_per_step, chunk, running)


def advance(schedule: Scheduler) -> list[tuple[int, int]]:
    """Plan one step, mark it computed: (request id, chunk length) each."""
    planned = schedule.plan()
    for item in planned:
        schedule.computed(item)
    return [(item.sequence.request.id, item.length) for item in planned]


def test_a_prompt_is_cut_into_chunks_and_shares_the_step_with_others() -> None:
    schedule = scheduler(16)
    schedule.add(Request(1, [5] * 150, max_tokens=1))
    schedule.add(Request(2, [5] * 10, max_tokens=1))
    assert advance(schedule) == [(2, 10), (1, 64)]
    schedule.running[1].tokens.append(7)  # request 2 drew a token
    assert advance(schedule) == [(2, 1), (1, 64)]
    schedule.finish(schedule.running[1])
    assert advance(schedule) == [(1, 22)]


def test_the_step_never_exceeds_its_budget() -> None:
    schedule = scheduler(64, tokens_per_step=100, chunk=64)
    for index in range(4):
        schedule.add(Request(index, [5] * 90, max_tokens=1))
    while not all(s.computed == 90 for s in schedule.running) or schedule.waiting:
        assert 0 < sum(length for _, length in advance(schedule)) <= 100


def test_siblings_share_full_pages_and_copy_the_unfinished_one() -> None:
    schedule = scheduler(16, chunk=128)
    schedule.add(Request(1, [5] * (PAGE + 3), n=3, max_tokens=1))
    advance(schedule)
    (first,) = schedule.running
    siblings = schedule.fork(first)
    assert [s.sample for s in siblings] == [1, 2]
    assert {s.pages[0] for s in siblings} == {first.pages[0]}
    assert len({first.pages[1], *(s.pages[1] for s in siblings)}) == 3
    assert all(s.cached == PAGE + 3 for s in siblings)
    for sequence in list(schedule.running):
        schedule.finish(sequence)
    assert schedule.pages.free == schedule.pages.count


def test_shared_pages_are_free_only_when_their_last_reader_is_done() -> None:
    schedule = scheduler(16, chunk=128)
    schedule.add(Request(1, [5] * (2 * PAGE), n=2, max_tokens=1))
    advance(schedule)
    (first,) = schedule.running
    (second,) = schedule.fork(first)
    assert first.pages == second.pages and schedule.pages.free == 14
    schedule.finish(first)
    assert schedule.pages.free == 14
    schedule.finish(second)
    assert schedule.pages.free == 16


def test_room_is_kept_for_siblings_so_that_they_share() -> None:
    schedule = scheduler(64, tokens_per_step=256, running=6)
    for index in range(4):
        schedule.add(Request(index, [5] * 20, n=3, max_tokens=1))
    advance(schedule)
    assert [s.request.id for s in schedule.running] == [0, 1]
    for sequence in list(schedule.running):
        assert all(sibling.cached == 20 for sibling in schedule.fork(sequence))
    assert len(schedule.running) == 6 and schedule.waiting[0].request.id == 2


def test_without_a_free_page_the_youngest_sequence_waits_again() -> None:
    schedule = scheduler(3, tokens_per_step=256)
    for index in range(3):
        schedule.add(Request(index, [5] * PAGE, max_tokens=PAGE))
    advance(schedule)
    for sequence in schedule.running:
        sequence.tokens.append(7)
    advance(schedule)
    assert schedule.preemptions >= 1
    assert schedule.waiting[0].request.id == 2 and schedule.waiting[0].computed == 0
    assert schedule.waiting[0].tokens[-1] == 7  # what was drawn stays drawn


def test_a_request_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="request 9: needs 3 pages, the pool has 2"):
        scheduler(2).add(Request(9, [5] * PAGE, max_tokens=PAGE + 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"n": 0}, "n is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-39}, "temperature is 1e-39"),
        ({"temperature": 1e39}, "temperature is 1e[+]39"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"seed": 1 << 64}, "seed is"),
    ],
)
def test_an_impossible_request_names_its_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**{"id": 1, "prompt": [1], **fields})  # type: ignore[arg-type]
