"""Whole runs with a cause: resumed, of another dtype, with a token flipped, with other draws."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runs import assert_same_run, lines_of, run, small_recipe
from vexact.loop.questions import Questions
from vexact.loop.versions import Versions
from vexact.model.tiny import named_config
from vexact.model.tokenizer import load_tokenizer
from vexact.recipe import EvalSection, LossSection, MismatchSection, Recipe, SamplingSection, SyncSection
from vexact.tasks import load_task

SAMPLING = SamplingSection(prompts=3, samples=4, max_tokens=5)


def recipe_of(tmp_path: Path, name: str, **changes: Any) -> Recipe:
    base: dict[str, Any] = {"loss": LossSection(), "sync": SyncSection(), "delay": 0, "sampling": SAMPLING}
    recipe = small_recipe(tmp_path / name, tmp_path / "odd.py", **{**base, **changes})
    return replace(recipe, task=replace(recipe.task, held_out=0.2))


def sizes(folder: Path) -> list[float]:
    return [line["tim/k3"] for line in lines_of(folder) if line["step"] >= 0]


@pytest.mark.parametrize("cause", ["missed-sync", "stale-prefix"])
@pytest.mark.parametrize("delay", [0, 1])
def test_weights_of_the_step_before_outlive_a_resume(cause: str, delay: int, tmp_path: Path) -> None:
    changes = {"mismatch": MismatchSection(cause=cause, degree=2), "delay": delay}
    whole, part = (recipe_of(tmp_path, name, **changes) for name in ("whole", "part"))
    run(whole)
    # Taken up behind step 4, whose publish is lost: what the step before was sampled with lies in the state alone.
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (tmp_path / "part" / "result.json").unlink()
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-000006")
    resumed(part)
    assert_same_run(tmp_path / "part", tmp_path / "whole")
    found = sizes(tmp_path / "whole")
    first = 2 if cause == "missed-sync" else 1 + delay
    assert not any(found[:first]) and any(found[first:]), found


def resumed(recipe: Recipe) -> None:
    """The folder of another recipe, but for its name, is taken up."""
    config = Path(recipe.run.folder) / "config.yaml"
    config.write_text(config.read_text().replace("/whole", "/part"))
    run(recipe)


def test_the_policy_of_the_step_before_is_kept_as_long_as_it_is_needed() -> None:
    for every, delay in ((1, 0), (1, 2), (3, 1)):
        versions, plain = Versions(every, delay, spare=1), Versions(every, delay)
        for step in range(12):
            versions.publish(step, f"weights {step}")  # type: ignore[arg-type]
            plain.publish(step, f"weights {step}")  # type: ignore[arg-type]
            assert versions.policy(step) == plain.policy(step)
            assert str(versions.before(step)) == f"weights {versions.source(max(0, step - 1))}"
    versions.sync(12)
    versions.publish(12, "weights 12")  # type: ignore[arg-type]
    assert str(versions.before(12)) == str(versions.policy(12)) == "weights 12"


@pytest.mark.parametrize("side", ["sampler", "trainer", "both-shared"])
def test_a_side_of_another_dtype_runs(side: str, tmp_path: Path) -> None:
    mismatch = MismatchSection(cause="other-dtype", dtype="float16", side=side, start=2, stop=4)
    run(recipe_of(tmp_path, "run", mismatch=mismatch, eval=EvalSection(items=3, every=2)))
    found = sizes(tmp_path / "run")
    assert [size > 0 for size in found] == [side != "both-shared" and 2 <= step < 4 for step in range(6)]


def test_a_flipped_token_parts_two_exact_runs(tmp_path: Path) -> None:
    run(recipe_of(tmp_path, "plain"))
    run(recipe_of(tmp_path, "flipped", mismatch=MismatchSection(cause="flipped-token", degree=2)))
    plain, flipped = (
        [line["fingerprint"] for line in lines_of(tmp_path / name) if line["step"] >= 0]
        for name in ("plain", "flipped")
    )
    assert plain[:2] == flipped[:2]
    assert all(a != b for a, b in zip(plain[2:], flipped[2:], strict=True))
    assert not any(line["tim/differing"] for line in lines_of(tmp_path / "flipped") if line["step"] >= 0)


def test_a_seed_for_sampling_gives_other_draws_of_the_same_questions(tmp_path: Path) -> None:
    for name, seed in (("plain", None), ("zero", 0), ("other", 7), ("another", 8)):
        sampling = SAMPLING if seed is None else replace(SAMPLING, seed=seed)
        run(recipe_of(tmp_path, name, sampling=sampling, steps=2, eval=EvalSection(items=3)))
    lines = {name: lines_of(tmp_path / name) for name in ("plain", "zero", "other", "another")}
    assert lines["zero"] == lines["plain"]
    last = {name: found[-1]["fingerprint"] for name, found in lines.items()}
    assert len(set(last.values())) == 3
    before = {name: {k: v for k, v in found[0].items() if k.startswith("eval_")} for name, found in lines.items()}
    assert before["other"] == before["plain"] and before["plain"]  # what an evaluation draws stays


def test_the_seed_for_sampling_is_one_of_training_alone(tmp_path: Path) -> None:
    seeds = {}
    for seed in (0, 7, 8):
        recipe = recipe_of(tmp_path, "none", seed=3, sampling=replace(SAMPLING, seed=seed))
        task, tokenizer = load_task(recipe.task, recipe.seed), load_tokenizer(recipe.model.path)
        config = named_config(recipe.model.path)
        assert config is not None
        questions = Questions(recipe, task, tokenizer, config)
        seeds[seed] = {request.seed for request in questions.requests(0, questions.items(0))}
        assert {request.seed for request in questions.evaluation([task.item(0)])} == {3}
    assert seeds[0] == {3} and len(set.union(*seeds.values())) == 3
