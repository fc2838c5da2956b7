"""`objective: sft`: every step is the cross-entropy of solutions, and a run of it is a function of its recipe."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from runs import assert_same_run, run
from vexact.loop import supervised as module
from vexact.loop import train
from vexact.loop.display import Display
from vexact.loop.loop import Loop
from vexact.loop.supervised import CROSS_ENTROPY
from vexact.model.rollout import Rollout
from vexact.recipe import (
    CheckpointSection,
    EvalSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RecipeError,
    RunSection,
    SamplingSection,
    TaskSection,
    load_recipe,
)
from vexact.tasks import load_task
from vexact.training.metrics import StepMetrics
from vexact.training.trainer import Trainer
from vexact.verification.checks import thread_count
from vexact.verification.ranks import on_ranks
from vexact_kernels import load

RECIPE = Recipe(
    name="supervised",
    objective="sft",
    steps=6,
    model=ModelSection("tiny-modsum", "bfloat16"),
    task=TaskSection(name="modsum", held_out=0.1),
    sampling=SamplingSection(prompts=12),
    optimizer=OptimizerSection(lr=1e-2, warmup=2),
    eval=EvalSection(items=20, every=3),
    checkpoint=CheckpointSection(every=2, keep=2),
)
UNKNOWN = ("reward_", "mismatch_", "ratio_", "clip_fraction", "k3", "tim/", "sampling", "remedy")  # nothing was sampled


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "whole"
    with thread_count(1):
        run(into(folder))
    return folder


def into(folder: Path, **changes: Any) -> Recipe:
    return replace(RECIPE, run=RunSection(folder=str(folder)), **changes)


def test_three_steps_and_three_are_six(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(into(folder, steps=3, checkpoint=CheckpointSection(every=3, keep=2)))
    result = run(into(folder))
    assert [line["step"] for line in result.lines] == [-1, 0, 1, 2, 3, 4, 5]
    assert len({line["fingerprint"] for line in result.lines[1:]}) == 6
    assert_same_run(folder, whole)


def test_a_run_that_dies_between_two_states_is_taken_up_and_is_the_whole_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Trainer.step

    def dying(trainer: Trainer, *given: Any) -> Any:
        if trainer.policy.version == 3:
            raise KeyboardInterrupt
        return steps(trainer, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", dying)
        with pytest.raises(KeyboardInterrupt):
            run(into(tmp_path / "run"))
    console = Console(file=io.StringIO(), width=200)
    run(into(tmp_path / "run"), console)
    assert_same_run(tmp_path / "run", whole)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3/6  loss " in text and "step 2/6  loss " not in text  # it went on from the state behind step 2


def test_two_ranks_take_up_what_one_began_and_it_is_the_whole_run(whole: Path, tmp_path: Path) -> None:
    recipe = into(tmp_path / "run", checkpoint=CheckpointSection(every=1, keep=2))
    run(replace(recipe, steps=3))
    recipe = into(tmp_path / "run")
    on_ranks(2, lambda ranks: train(recipe, kernels=load(), console=Console(quiet=True), ranks=ranks))
    assert_same_run(tmp_path / "run", whole)


def test_what_is_kept_is_seen_by_the_comparison(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(into(other, optimizer=replace(RECIPE.optimizer, warmup=3)))
    with pytest.raises(AssertionError):
        assert_same_run(other, whole)


def test_the_line_of_a_step_has_the_cross_entropy_of_its_solutions_and_nothing_of_sampling(whole: Path) -> None:
    lines = run(into(whole)).lines
    loop = made(RECIPE)
    solutions = loop.questions.solutions(0, 12, loop.trainer.policy)
    logprobs = loop.trainer.policy.logprobs([rollout.scored for rollout in solutions]).logprob.double()
    assert lines[1]["loss"] == pytest.approx(-float(logprobs.mean()), rel=1e-6)
    assert lines[1]["tokens"] == len(logprobs) and lines[1]["rollouts"] == 12
    assert [name for line in lines for name in line if name.startswith(UNKNOWN)] == []
    assert [line["lr"] for line in lines[1:]] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01, 0.01])
    assert lines[1]["learning_rate"] == lines[1]["lr"]  # by the name that dashboards know
    assert ["eval_success" in line for line in lines] == [True, False, False, True, False, False, True]
    assert lines[-1]["loss"] < lines[1]["loss"]


def made(recipe: Recipe, task: Any = None) -> Loop:
    return Loop(recipe, task or load_task(recipe.task, recipe.seed), load(), lambda line: None)


def test_every_step_learns_from_solutions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Rollout]] = []
    loop = made(RECIPE)
    assert loop.trainer.loss == CROSS_ENTROPY and loop.trainer.section == RECIPE.optimizer
    true = loop.trainer.step

    def noted(rollouts: list[Rollout], advantages: Tensor) -> StepMetrics:
        seen.append(rollouts)
        return true(rollouts, advantages)

    monkeypatch.setattr(loop.trainer, "step", noted)
    for step in range(3):
        loop.step(step, Display(Console(quiet=True), 3, 1))
    prompts = [tuple(rollout.prompt) for rollouts in seen for rollout in rollouts]
    assert len(prompts) == 36 and len(set(prompts)) > 30


def test_it_is_the_warm_start_in_every_bit() -> None:
    """The same solutions, loss and optimizer: only where the state lies differs."""
    rl = replace(RECIPE, objective="rl", warm_start=replace(RECIPE.warm_start, steps=4, sequences=12, lr=1e-2), steps=0)
    warm, own = made(rl), made(replace(RECIPE, optimizer=OptimizerSection(lr=1e-2)))
    warm.begin(lambda line: None)
    for step in range(4):
        module.learn(own.trainer, own.questions, step, 12)
    assert warm.trainer.fingerprint() == own.trainer.fingerprint()


@pytest.mark.parametrize(
    "key, value",
    [
        ("loss.name", "gspo"),
        ("loss.kl.coef", "0.1"),
        ("warm_start.steps", "3"),
        ("sync.every", "2"),
        ("delay", "1"),
        ("mismatch.site", "logits"),
        ("sampling.samples", "2"),
        ("sampling.temperature", "0.5"),
        ("sampling.rounds", "2"),
        ("sampling.seed", "2"),
        ("run.diagnose", "1"),
    ],
)
def test_a_value_that_supervised_steps_have_no_use_for_is_refused_by_name(key: str, value: str) -> None:
    load_recipe(None, [f"--{key}={value}"])
    with pytest.raises(RecipeError, match=rf"^{key} = .*{value}.* has no meaning with objective = sft"):
        load_recipe(None, ["--objective=sft", f"--{key}={value}"])


def test_a_recipe_says_its_objective_and_no_third_one_is_known(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.to_yaml())
    assert load_recipe(file) == RECIPE and load_recipe(None).objective == "rl"
    with pytest.raises(RecipeError, match="objective = 'dpo' is not one of rl, sft"):
        load_recipe(None, ["--objective=dpo"])
    assert replace(RECIPE, objective="rl", loss=LossSection(name="gspo")).loss.name == "gspo"
