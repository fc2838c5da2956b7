"""A run whose sampler is older than its trainer: recorded, trained with, replayed without a bit of difference; and what
a remedy can want behind a step."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from vexact.loop.display import Display
from vexact.loop.loop import Loop
from vexact.recipe import EvalSection, ModelSection, OptimizerSection, Recipe, SamplingSection, SyncSection, TaskSection
from vexact.study.remedies import TokenTIS
from vexact.tasks import load_task
from vexact.verification.checks import thread_count
from vexact_kernels import load

RECIPE = Recipe(
    steps=8,
    model=ModelSection("tiny-modsum"),
    task=TaskSection(name="modsum", held_out=0.1),
    sampling=SamplingSection(prompts=3, samples=4, max_tokens=5),
    optimizer=OptimizerSection(lr=1e-2),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


class Scripted(TokenTIS):
    """A remedy that changes no weight and says what it is told to, step by step."""

    def __init__(self, *answers: str) -> None:
        super().__init__(cap=1e30)
        self.answers = iter(answers)

    def after_update(self, metrics: Mapping[str, float]) -> Any:
        return next(self.answers, "none")


def varied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that differ within each group, so that every step moves the weights."""
    monkeypatch.setattr("vexact.tasks.modsum.Modsum.reward", lambda self, item, text: float(sum(map(ord, text)) % 7))


def lines(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[dict[str, Any]]:
    varied(monkeypatch)
    loop = Loop(recipe, load_task(recipe.task, recipe.seed), load(), lambda line: None)
    if answers:
        loop.trainer.remedy = Scripted(*answers)
    display = Display(Console(file=io.StringIO()), recipe.steps, 12)
    found = []
    for step in range(recipe.steps):
        line = loop.step(step, display)
        assert loop.sampled is not None
        line["versions"] = {rollout.version for rollout in loop.sampled.rollouts}
        found.append({**line, **loop.evaluate(step)})
    return found


@pytest.mark.parametrize(
    ("every", "delay", "sampled"),
    [(1, 0, [0, 1, 2, 3, 4, 5, 6, 7]), (4, 0, [0, 0, 0, 0, 4, 4, 4, 4]), (1, 2, [0, 0, 0, 1, 2, 3, 4, 5]),
     (3, 1, [0, 0, 0, 0, 3, 3, 3, 6])],
)  # fmt: skip
def test_each_rollout_says_the_version_that_drew_it_and_none_of_its_tokens_differs_there(
    every: int, delay: int, sampled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lines(replace(RECIPE, sync=SyncSection(every), delay=delay), monkeypatch)
    assert [line["version"] for line in found] == list(range(1, 9))
    assert [line["sampler_version"] for line in found] == sampled
    assert [line["versions"] for line in found] == [{version} for version in sampled]
    assert [line["lag"] for line in found] == [step - version for step, version in enumerate(sampled)]
    for line in found:
        assert (line["mismatch_tokens"], line["mismatch_compared"]) == (0, line["tokens"])
        assert (line["ratio_min"] == line["ratio_max"] == 1) == (line["lag"] == 0)  # what the trainer sees is lag


def test_a_sync_that_a_remedy_wants_comes_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, sync=SyncSection(5), delay=1)
    found = lines(recipe, monkeypatch, "none", "none", "sync", "none")
    assert [line["sampler_version"] for line in found] == [0, 0, 0, 3, 3, 3, 3, 3]
    assert [line["remedy_after"] for line in found][:4] == ["none", "none", "sync", "none"]


def test_a_step_that_a_remedy_takes_back_was_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, version and the next step's sampler are those from before it; what comes then is as if it were new."""
    monkeypatch.setattr(Scripted, "can_undo", True)
    found = lines(RECIPE, monkeypatch, "none", "rollback", "none", "rollback")
    assert [line["version"] for line in found] == [1, 2, 2, 3, 3, 4, 5, 6]  # of the policy that a step trained
    assert [line["rollbacks"] for line in found] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [line["sampler_version"] for line in found] == [0, 1, 1, 2, 2, 3, 4, 5]
    assert [line["lag"] for line in found] == [0] * 8
    assert found[1]["fingerprint"] == found[0]["fingerprint"] != found[2]["fingerprint"]
    kept = lines(RECIPE, monkeypatch, "none", "none")
    assert kept[1]["fingerprint"] != found[1]["fingerprint"]


def test_sampler_and_trainer_are_measured_apart_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, steps=4, sync=SyncSection(3), eval=EvalSection(items=20, every=1, n=2))
    measures: list[int] = []
    true_success = Loop.success

    def counted(self: Loop, policy: Any) -> dict[str, Any]:
        measures.append(policy.version)
        return true_success(self, policy)

    monkeypatch.setattr(Loop, "success", counted)
    found = lines(recipe, monkeypatch)
    assert measures == [1, 0, 2, 0, 3, 4, 3]
    assert all("eval_pass_at_2" in line for line in found)
    assert found[2]["eval_success"] == found[2]["eval_sampler_success"]
