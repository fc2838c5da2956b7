"""The loop joins sampler and trainer: what is sampled is what is trained, and a run is a function of its recipe."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers import assert_same_bits
from vexact.loop import RunError, RunResult, train
from vexact.loop.display import Display
from vexact.loop.loop import Loop
from vexact.loop.questions import Questions
from vexact.model.checkpoint import fingerprint, load_weights
from vexact.model.config import ModelConfig
from vexact.recipe import (
    EvalSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RunSection,
    SamplingSection,
    TaskSection,
    load_recipe,
)
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.tasks import Answer, Item, Scores, load_task
from vexact.training.trainer import weights_of
from vexact.verification.checks import thread_count
from vexact_kernels import load

TIMES = (
    "seconds",
    "sampling_seconds",
    "scoring_seconds",
    "training_seconds",
    "sampling_tokens_per_second",
    "training_tokens_per_second",
    "eval_seconds",
)
BASE = Recipe(
    name="test",
    steps=3,
    model=ModelSection("tiny", "bfloat16"),
    sampling=SamplingSection(prompts=3, samples=4, max_tokens=5),
    optimizer=OptimizerSection(lr=1e-3),
)


class Letters:
    """Reward: the share of lower-case letters in a completion, which a random model can raise."""

    stop = "\n"

    def item(self, index: int) -> Item:
        return Item(index, f"{index}:", "")

    def reward(self, item: Item, completion: str) -> float:
        return sum("a" <= letter <= "z" for letter in completion) / max(1, len(completion))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: one thread is faster than two that wait for each other, and threads change no bit."""
    with thread_count(1):
        yield


def run(folder: Path, recipe: Recipe = BASE, task: Any = None, console: Console | None = None) -> RunResult:
    recipe = replace(recipe, run=RunSection(folder=str(folder)))
    return train(recipe, kernels=load(), console=console or Console(file=io.StringIO()), task=task or Letters())


def without_times(result: RunResult) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in result.lines]


def test_a_run_leaves_its_recipe_its_surroundings_its_metrics_and_its_weights(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    assert load_recipe(result.folder / "config.yaml") == replace(BASE, run=RunSection(folder=str(tmp_path / "run")))
    environment = json.loads((result.folder / "env.json").read_text())
    assert environment["arithmetic_digest"] and environment["kernels"] == load().name
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == result.lines
    assert all(line["aggregation"] == "token-mean" for line in lines)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["version"] for line in lines] == [1, 2, 3]
    config = ModelConfig.from_folder(result.folder / "checkpoint")
    weights = load_weights(result.folder / "checkpoint", config, say=lambda line: None)
    assert fingerprint(weights) == lines[-1]["fingerprint"] != environment["weights_fingerprint"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_token_differs_and_every_ratio_is_one_at_every_step(dtype: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", replace(BASE, model=ModelSection("tiny", dtype)))
    for line in result.lines:
        assert line["tokens"] > 20 and line["grad_norm"] > 0
        assert (line["mismatch_tokens"], line["mismatch_max"], line["k3"], line["clip_fraction"]) == (0, 0, 0, 0)
        assert (line["ratio_min"], line["ratio_max"]) == (1, 1)


def test_a_run_is_a_function_of_its_recipe_and_not_of_its_schedule(tmp_path: Path) -> None:
    expected = without_times(run(tmp_path / "a"))
    assert without_times(run(tmp_path / "b")) == expected
    sampling = replace(BASE.sampling, tokens_per_step=7, chunk=2, running=3)
    schedule = replace(BASE, sampling=sampling, optimizer=replace(BASE.optimizer, tokens_at_once=1))
    assert without_times(run(tmp_path / "c", schedule)) == expected
    assert without_times(run(tmp_path / "d", replace(BASE, seed=1))) != expected


def test_what_the_loop_rewards_becomes_more_frequent(tmp_path: Path) -> None:
    recipe = replace(BASE, steps=12, sampling=replace(BASE.sampling, samples=8), optimizer=OptimizerSection(lr=3e-3))
    rewards = [line["reward_mean"] for line in run(tmp_path / "run", recipe).lines]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6


def made(recipe: Recipe = BASE, task: Any = None, model: str = "tiny") -> Loop:
    recipe = replace(recipe, model=replace(recipe.model, path=model), eval=replace(recipe.eval, items=5))
    return Loop(recipe, task or Letters(), load(), lambda line: None)


def test_after_a_step_the_sampler_is_a_fresh_one_with_the_trained_weights() -> None:
    loop = made()
    loop.step(0, Display(Console(file=io.StringIO()), 1, 12))
    sampler = loop.samplers.adopt(loop.trainer.policy)
    assert sampler.policy is loop.trainer.policy
    for name, weight in weights_of(sampler.policy).items():
        assert_same_bits(weight, weights_of(loop.trainer.policy)[name], name)
    request = Request(id=9, prompt=[256, 48, 58], n=3, seed=5, max_tokens=6)
    used, fresh = sampler.run([request]), Sampler(loop.trainer.policy).run([request])
    for a, b in zip(used, fresh, strict=True):
        assert list(a.completion) == list(b.completion)
        assert_same_bits(a.logprobs, b.logprobs)
    assert used[0].cached_tokens == 0
    assert used[0].version == 1


def test_no_two_requests_of_a_run_share_an_address() -> None:
    recipe = replace(BASE, sampling=replace(BASE.sampling, rounds=2))
    questions = made(recipe, load_task(TaskSection(name="modsum", held_out=0.1), 0), "tiny-modsum").questions
    requests = [
        request
        for step in (0, 1, 2**31 - 1)
        for turn in (0, 1)
        for request in questions.requests(step, questions.items(step % 9, turn), turn)
    ]
    requests += questions.evaluation(questions.held_out())
    assert len({request.id for request in requests}) == len(requests)


def test_no_question_is_asked_twice_while_there_are_others() -> None:
    questions = made().questions
    assert [item.index for step in (0, 1) for item in questions.items(step)] == [0, 1, 2, 3, 4, 5]
    questions = made(replace(BASE, sampling=replace(BASE.sampling, rounds=2))).questions
    asked = [item.index for step in (0, 1) for turn in (0, 1) for item in questions.items(step, turn)]
    assert asked == list(range(12))
    assert [item.index for item in questions.items(1, 1, 2)] == [9, 10]


def test_a_rollout_is_scored_with_the_question_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = made()

    given: list[Answer] = []
    score = loop.scoring.score

    def noted(step: int, answers: Sequence[Answer]) -> Scores:
        given.extend(answers)
        return score(step, answers)

    monkeypatch.setattr(loop.scoring, "score", noted)
    loop.versions.publish(1, loop.trainer.policy)
    loop.step(1, Display(Console(file=io.StringIO()), 2, 12))
    questions = loop.questions
    asked = questions.items(1)
    items = {request.id: item for request, item in zip(questions.requests(1, asked), asked, strict=True)}
    assert len(given) == len({(answer.request, answer.sample) for answer in given}) == 12
    for answer in given:
        assert answer.item == items[answer.request]
        assert answer.completion == questions.tokenizer.decode(answer.ids)


def test_completions_end_at_the_tasks_stop_and_at_the_models_end() -> None:
    loop = made()
    assert loop.questions.stop_ids == {ord("\n"), *loop.trainer.policy.config.eos_token_ids}


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("of somebody else's")
    with pytest.raises(RunError, match="run: exists already and is not empty"):
        run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letter.txt"]


def test_a_model_that_cannot_be_loaded_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        run(tmp_path / "run", replace(BASE, model=ModelSection(str(tmp_path / "none"))))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("pages", [64, 1])
def test_requests_that_can_never_be_served_leave_no_folder(
    pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexact.rollout.sampler.default_pages", lambda config, dtype: pages)
    out = io.StringIO()
    recipe = replace(BASE, sampling=replace(BASE.sampling, max_tokens=5000 if pages == 64 else 100))
    with pytest.raises(ValueError, match="max_tokens 5000 exceed the model's" if pages == 64 else "the pool has 1$"):
        run(tmp_path / "run", recipe, console=Console(file=out))
    assert not (tmp_path / "run").exists()
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": LossSection(overlong_buffer=6)}, r"loss\.overlong_buffer = 6 is more than sampling\.max_tokens = 5"),
        ({"eval": EvalSection(items=3)}, r"eval\.items: the task Letters has no questions for evaluation"),
        ({"steps": 99, "delay": 50}, r"sync\.every = 1 and delay = 50 keep 51 versions"),
    ],
)
def test_what_would_fail_later_is_refused_at_the_beginning(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexact.loop.loop.memory_of", lambda device: 10_000_000)
    run(tmp_path / "before")
    with pytest.raises(RunError, match=message):
        run(tmp_path / "run", replace(BASE, **changes))
    assert not (tmp_path / "run").exists()


def test_the_best_weights_are_kept_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    successes = iter([0.1, 0.4, 0.4, 0.3])
    monkeypatch.setattr(Loop, "success", lambda loop, policy: {"success": next(successes)})
    recipe = replace(
        BASE, model=ModelSection("tiny-modsum"), task=TaskSection(name="modsum"), eval=EvalSection(items=5, every=1)
    )
    monkeypatch.setattr(Questions, "held_out", lambda questions: [])
    result = run(tmp_path / "run", recipe, load_task(recipe.task, 0))
    assert [line["eval_success"] for line in result.lines] == [0.1, 0.4, 0.4, 0.3]
    assert [path.name for path in sorted(result.folder.glob("best-*"))] == ["best-000001"]
    config = ModelConfig.from_folder(result.folder / "best-000001")
    weights = load_weights(result.folder / "best-000001", config, say=lambda line: None)
    assert fingerprint(weights) == result.lines[1]["fingerprint"]


def test_an_interrupt_leaves_whole_lines(tmp_path: Path) -> None:
    class Interrupted(Letters):
        def item(self, index: int) -> Item:
            if index == 7:
                raise KeyboardInterrupt
            return super().item(index)

    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", task=Interrupted(), console=Console(file=out, width=120))
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert [json.loads(line)["step"] for line in text.splitlines()] == [0, 1]
    assert "for 2 steps" in out.getvalue()
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_sees_a_line_a_step_and_a_table_and_on_a_terminal_a_bar(terminal: bool, tmp_path: Path) -> None:
    out = io.StringIO()
    result = run(tmp_path / "run", console=Console(file=out, width=120, force_terminal=terminal, color_system=None))
    tokens = sum(line["tokens"] for line in result.lines)
    for expected in ("step 1/3  reward", "step 3/3  reward", f"0 of {tokens} tokens", "importance ratios"):
        assert expected in out.getvalue()
    assert ("0/12" in out.getvalue()) == terminal  # rollouts of a step on the bar


def test_the_recipe_of_the_project_runs_on_tiny(tmp_path: Path) -> None:
    recipe = load_recipe(Path(__file__).parents[1] / "recipes" / "tiny_chain_sum.yaml", ["--steps", "1"])
    recipe = replace(recipe, run=RunSection(folder=str(tmp_path / "run")))
    result = train(recipe, kernels=load(), console=Console(file=io.StringIO()))
    assert result.lines[0]["mismatch_tokens"] == 0
    assert result.lines[0]["tokens"] > 50
