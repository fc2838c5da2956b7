"""The supervised start: its loss is the cross-entropy of solutions, it ends by what it reaches, its traces are gone."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from helpers import assert_same_bits
from vexact.loop import RunError, train
from vexact.loop.loop import Loop
from vexact.loop.warm_start import WarmStart
from vexact.recipe import (
    EvalSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RunSection,
    SamplingSection,
    TaskSection,
    WarmStartSection,
)
from vexact.tasks import Item, load_task
from vexact.verification.checks import thread_count
from vexact_kernels import load

RECIPE = Recipe(
    name="warm",
    steps=2,
    model=ModelSection("tiny-modsum"),
    task=TaskSection(name="modsum", held_out=0.1),
    sampling=SamplingSection(prompts=3, samples=4),
    optimizer=OptimizerSection(lr=1e-3),
    warm_start=WarmStartSection(steps=6, every=2, sequences=8),
    eval=EvalSection(items=20),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


def made(recipe: Recipe = RECIPE, task: Any = None) -> Loop:
    return Loop(recipe, task or load_task(recipe.task, recipe.seed), load(), lambda line: None)


def test_the_loss_is_the_cross_entropy_of_the_solutions() -> None:
    loop = made()
    policy = loop.trainer.policy
    solutions = loop.questions.solutions(0, 8, policy)
    logprobs = policy.logprobs([rollout.scored for rollout in solutions]).logprob.double()
    line = WarmStart(loop.recipe, loop.questions, loop.trainer, lambda: 0.0, lambda text: None).step(0)
    assert line.loss == pytest.approx(-float(logprobs.mean()), rel=1e-6)
    assert line.tokens == len(logprobs)


def test_a_solution_is_what_the_task_says_behind_its_prompt() -> None:
    loop = made()
    for rollout in loop.questions.solutions(3, 8, loop.trainer.policy):
        item = loop.task.item((1 << 30) + 24 + (rollout.request & 0xFFFFFFFF))
        assert loop.questions.tokenizer.decode(rollout.prompt) == item.prompt
        assert loop.questions.tokenizer.decode(rollout.completion) == item.solution
        assert rollout.completion[-1] in loop.questions.stop_ids


class Plain:
    """A task without a stop, whose third item has no solution."""

    stop = ""

    def item(self, index: int) -> Item:
        return Item(index, f"{index}=", "1", "" if index == (1 << 30) + 2 else "1")

    def reward(self, item: Item, completion: str) -> float:
        return float(completion == item.answer)


def test_where_a_task_has_no_stop_the_models_end_is_learned_and_items_without_solution_are_named() -> None:
    recipe = replace(RECIPE, eval=EvalSection())
    loop = made(recipe, Plain())
    end = loop.trainer.policy.config.eos_token_ids
    assert [list(rollout.completion) for rollout in loop.questions.solutions(0, 2, loop.trainer.policy)] == [
        [1, end[0]],
        [1, end[0]],
    ]
    with pytest.raises(RunError, match=f"item {(1 << 30) + 2} of task modsum has no solution"):
        loop.questions.solutions(0, 3, loop.trainer.policy)


def run_until(successes: list[float], **changes: Any) -> tuple[dict[str, Any], int]:
    """What a start reports, and how many looks it took, where success is as given."""
    loop = made(replace(RECIPE, warm_start=replace(RECIPE.warm_start, **changes)))
    looks, seen = iter(successes), list[float]()

    def success() -> float:
        seen.append(next(looks))
        return seen[-1]

    line = WarmStart(loop.recipe, loop.questions, loop.trainer, success, lambda text: None).run()
    return line, len(seen)


def test_it_ends_with_the_first_look_that_is_good_enough() -> None:
    assert run_until([0.1, 0.2, 0.5, 0.9], until=0.5)[0]["warm_start_steps"] == 4
    assert run_until([0.5], until=0.5)[0]["warm_start_steps"] == 0
    line, looks = run_until([0.0] * 4, until=0.5)
    assert (line["warm_start_steps"], looks) == (6, 4)
    assert run_until([])[1] == 0


def test_reinforcement_begins_as_version_0_with_fresh_moments_and_the_masters_that_were_learned() -> None:
    loop = made()
    start = loop.trainer
    untrained = {name: master.clone() for name, master in start.optimizer.masters.items()}
    line = loop.begin(lambda text: None)
    assert line["warm_start_steps"] == 6 and math.isfinite(line["warm_start_loss"])
    assert loop.trainer is not start and loop.trainer.policy.version == 0
    assert loop.versions.policy(0) is loop.trainer.policy
    assert (loop.trainer.loss, loop.trainer.section) == (RECIPE.loss, RECIPE.optimizer)
    for name, master in loop.trainer.optimizer.masters.items():
        assert_same_bits(master, start.optimizer.masters[name])
        assert not torch.equal(master, untrained[name])
        assert not loop.trainer.optimizer.second[name].any()
    assert loop.trainer.optimizer.power1 == 1.0


def test_a_run_says_what_was_before_its_first_step_and_is_a_function_of_its_recipe(tmp_path: Path) -> None:
    def lines(name: str) -> list[dict[str, Any]]:
        recipe = replace(RECIPE, run=RunSection(folder=str(tmp_path / name)))
        return train(recipe, kernels=load(), console=Console(file=io.StringIO())).lines

    first, again = lines("a"), lines("b")
    assert [line["step"] for line in first] == [-1, 0, 1]
    assert first[0]["warm_start_steps"] == 6
    assert [line["fingerprint"] for line in first] == [line["fingerprint"] for line in again]
    assert ["eval_success" in line for line in first] == [True, False, True]


def test_success_cannot_be_looked_at_without_questions() -> None:
    recipe = replace(RECIPE, eval=EvalSection(), warm_start=replace(RECIPE.warm_start, until=0.5))
    with pytest.raises(RunError, match=r"warm_start\.until looks at held-out success: eval\.items"):
        made(recipe).check()
