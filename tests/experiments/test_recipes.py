"""What names a run, and what arms share."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from vexact.experiments import StudyError, load_study
from vexact.experiments.recipes import Job, digest_of, files_of, kept_keys, plan
from vexact.model.checkpoint import save_folder
from vexact.model.tiny import named_config, tiny_weights
from vexact.recipe import (
    CheckpointSection,
    MismatchSection,
    ModelSection,
    Recipe,
    RewardSection,
    RunSection,
    SyncSection,
    TaskSection,
)
from vexact_kernels import Kernels, load

TINY = Recipe(model=ModelSection("tiny-modsum"))
BASE = {
    "model": {"path": "tiny-modsum"},
    "task": {"name": "modsum", "held_out": 0.1},
    "warm_start": {"steps": 4, "until": 0.9},
    "eval": {"items": 5},
}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load()


def planned(folder: Path, kernels: Kernels, arms: list[dict[str, Any]], **content: Any) -> tuple[list[Job], list[Job]]:
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump({"recipe": BASE, "arms": arms, **content}))
    return plan(load_study(path), folder / "out", kernels)


def test_a_digest_names_the_bits_of_a_run_and_nothing_else(kernels: Kernels) -> None:
    name = digest_of(TINY, kernels)
    same = replace(TINY, name="x", run=RunSection(root="y"), checkpoint=CheckpointSection(every=9), device="cuda")
    assert digest_of(same, kernels) == name
    assert digest_of(replace(TINY, sampling=replace(TINY.sampling, running=3)), kernels) == name
    others = [
        digest_of(replace(TINY, seed=1), kernels),
        digest_of(replace(TINY, steps=6), kernels),
        digest_of(replace(TINY, sync=SyncSection(2)), kernels),
        digest_of(replace(TINY, model=ModelSection("tiny-modsum", "bfloat16")), kernels),
        digest_of(TINY, kernels, "a start"),
    ]
    assert len({name, *others}) == 6
    assert len(name) == 16
    # What can be read off a run is part of its name: its bits are not changed by it.
    assert digest_of(replace(TINY, run=RunSection(diagnose=5)), kernels) != name


def test_what_is_in_the_files_that_a_recipe_names_is_part_of_the_name(kernels: Kernels, tmp_path: Path) -> None:
    model, reward = tmp_path / "model", tmp_path / "reward.py"
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    config = named_config("tiny-modsum")
    assert config is not None
    save_folder(model, config, tiny_weights(config))
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    held_out.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    reward.write_text("def score(completions): return [1.0] * len(completions)\n")
    options = {"path": str(rows), "held_out_path": str(held_out)}
    task = TaskSection(name="file", options=options, reward=RewardSection(function=f"{reward}:score"))
    recipe = replace(TINY, model=ModelSection(str(model)), task=task)
    names = {digest_of(recipe, kernels)}
    assert {digest_of(recipe, kernels)} == names and digest_of(TINY, kernels) not in names
    weights = tiny_weights(config)
    weights["model.embed_tokens.weight"][3] += 1.0
    shutil.rmtree(model)
    save_folder(model, config, weights)
    names.add(digest_of(recipe, kernels))
    rows.write_text('{"prompt": "1+1=", "answer": "3"}\n')
    names.add(digest_of(recipe, kernels))
    reward.write_text("def score(completions): return [0.0] * len(completions)\n")
    names.add(digest_of(recipe, kernels))
    held_out.write_text('{"prompt": "1+3=", "answer": "4"}\n')
    names.add(digest_of(recipe, kernels))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert len(names | {digest_of(recipe, kernels)}) == 6


def test_the_source_of_a_reward_function_in_a_module_is_one_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "made_rewards.py").write_text("def score(completions): return [1.0]\n")
    found = files_of(replace(TINY, task=TaskSection(reward=RewardSection(function="made_rewards:score"))))
    assert found == [tmp_path / "made_rewards.py"]
    missing = replace(TINY, task=TaskSection(reward=RewardSection(function="no.such_module:score")))
    assert files_of(missing) == files_of(TINY) == []


def test_how_a_run_is_computed_names_it_where_a_cause_goes_by_it(kernels: Kernels) -> None:
    for cause, renamed in (("torch", True), ("split-kv", True), ("split-k", False)):
        plain = replace(TINY, mismatch=MismatchSection(cause=cause))
        others = [
            replace(plain, sampling=replace(plain.sampling, **{key: 3}))
            for key in ("tokens_per_step", "chunk", "running", "pages")
        ]
        others += [
            replace(plain, optimizer=replace(plain.optimizer, tokens_at_once=3)), replace(plain, device="cuda")
        ]  # fmt: skip
        names = {digest_of(each, kernels) for each in (plain, *others)}
        assert len(names) == (7 if renamed else 1)
        assert digest_of(replace(plain, checkpoint=CheckpointSection(every=9)), kernels) in names


def test_a_key_at_its_default_is_no_part_of_it() -> None:
    """So a key that a later version adds renames no run."""
    assert kept_keys(Recipe()) == {}
    assert kept_keys(replace(TINY, steps=6)) == {"steps": 6, "model.path": "tiny-modsum"}


def test_arms_share_a_start_unless_they_differ_in_what_it_learns(tmp_path: Path, kernels: Kernels) -> None:
    arms: list[dict[str, Any]] = [
        {"name": "exact", "role": "exact"},
        {"name": "lr", "overrides": {"optimizer.lr": 1e-2}},
        {"name": "noise", "overrides": {"mismatch.site": "logits", "mismatch.sigma": 0.1, "sync.every": 4}},
        {"name": "dtype", "overrides": {"model.dtype": "bfloat16"}},
        {"name": "flips", "overrides": {"task.reward.flip": 0.3}},
        {"name": "task", "overrides": {"task.options.modulus": 7}},
    ]
    starts, runs = planned(tmp_path, kernels, arms, seeds=2)
    of = {job.arm: job.recipe.model.path for job in runs}
    assert len(starts) == 2 and len(runs) == 12
    assert len({of[name] for name in ("exact", "lr", "noise", "dtype", "flips")}) == 1
    assert of["task"] != of["exact"]
    assert {job.recipe.warm_start.steps for job in runs} == {0}
    assert [(job.recipe.steps, job.recipe.sync.every, job.recipe.mismatch.off) for job in starts] == [(0, 1, True)] * 2


def test_a_start_may_be_one_a_seed(tmp_path: Path, kernels: Kernels) -> None:
    arms: list[dict[str, Any]] = [
        {"name": "exact", "role": "exact"},
        {"name": "other", "role": "null", "seed_offset": 9},
    ]
    assert len(planned(tmp_path, kernels, arms, seeds=3)[0]) == 1
    assert len(planned(tmp_path, kernels, arms, seeds=3, warm_start="per_seed")[0]) == 6


def test_arms_that_come_to_the_same_share_runs_unless_one_shows_what_chance_does(
    tmp_path: Path, kernels: Kernels
) -> None:
    exact: dict[str, Any] = {"name": "exact", "role": "exact"}
    twin: dict[str, Any] = {"name": "twin", "overrides": {"sync.every": 1}}
    _, runs = planned(tmp_path, kernels, [exact, twin])
    assert runs[0].digest == runs[1].digest
    with pytest.raises(StudyError, match="arm twin with seed 0 is a run of arm exact"):
        planned(tmp_path, kernels, [exact, {**twin, "role": "null"}])
    near: dict[str, Any] = {"name": "near", "role": "null", "seed_offset": 1}
    with pytest.raises(StudyError, match="is a run of arm"):
        planned(tmp_path, kernels, [exact, near], seeds=2)


def test_rollouts_stay_of_the_first_seed_of_each_arm_by_default(tmp_path: Path, kernels: Kernels) -> None:
    arms: list[dict[str, Any]] = [{"name": "a"}, {"name": "b", "overrides": {"delay": 1}}]
    kept = {
        seeds: [job.recipe.run.rollouts == "always" for job in planned(
            tmp_path, kernels, arms, seeds=2, rollouts={"seeds": seeds})[1]]
        for seeds in ("first", "all", "none")
    }  # fmt: skip
    assert kept == {"first": [True, True, False, False], "all": [True] * 4, "none": [False] * 4}
