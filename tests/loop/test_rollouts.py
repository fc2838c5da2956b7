"""Rollouts as parquet: every token with both log-probabilities, as numbers and as bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from helpers import assert_same_bits
from made import make_rollouts, make_trainer, shifted, some_advantages
from runs import run, small_recipe
from vexact.loop import RunError
from vexact.loop.rollouts import Sampled, scored_of, wanted, write_rollouts
from vexact.model.policy import Policy
from vexact.model.tokenizer import load_tokenizer
from vexact.recipe import CheckpointSection, LossSection, SyncSection
from vexact.tasks import Scores
from vexact.verification.checks import thread_count

NAMES = [
    "step", "request", "sample", "prompt", "completion", "prompt_ids", "completion_ids", "sampler_logprobs",
    "sampler_logprobs_bits", "trainer_logprobs", "trainer_logprobs_bits", "exact_logprobs", "exact_logprobs_bits",
    "reward", "reward_unflipped", "success", "advantage", "finish", "temperature", "version", "digest",
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


def as_bits(values: list[float]) -> list[int]:
    return torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()


def test_a_run_leaves_a_file_a_step_that_can_be_scored_again(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "run", tmp_path / "reward.py", steps=3, sync=SyncSection(), delay=0)
    result = run(replace(recipe, checkpoint=CheckpointSection()))
    files = sorted((result.folder / "rollouts").iterdir())
    assert [file.name for file in files] == ["step-000000.parquet", "step-000001.parquet", "step-000002.parquet"]
    tokenizer = load_tokenizer("tiny-modsum")
    for step, file in enumerate(files):
        assert pyarrow.parquet.read_schema(file).names == NAMES
        rows = rows_of(file)
        assert len(rows) == 15
        for row in rows:
            assert (row["step"], row["version"], row["request"] >> 32) == (step, step, step)
            assert row["completion"] == tokenizer.decode(row["completion_ids"])
            assert row["prompt"] == tokenizer.decode(row["prompt_ids"]) and row["prompt"].endswith("=")
            assert row["reward"] == sum(sign in "13579" for sign in row["completion"]) / max(1, len(row["completion"]))
            assert row["sampler_logprobs_bits"] == as_bits(row["sampler_logprobs"])
            assert row["trainer_logprobs_bits"] == row["sampler_logprobs_bits"] == row["exact_logprobs_bits"]
            assert len(row["completion_ids"]) == len(row["sampler_logprobs"])
        assert sum(row["reward"] for row in rows) / 15 == pytest.approx(result.lines[step]["reward_mean"])
        assert sum(row["advantage"] for row in rows) == pytest.approx(0, abs=1e-4)


def test_a_loss_of_bits_would_show(tmp_path: Path) -> None:
    """The trainer's log-probabilities are its own, not a copy of the sampler's."""
    recipe = small_recipe(tmp_path / "run", tmp_path / "reward.py", steps=3)  # the sampler is older than the trainer
    folder = run(replace(recipe, checkpoint=CheckpointSection())).folder / "rollouts"
    rows = rows_of(folder / "step-000002.parquet")
    assert all(row["trainer_logprobs_bits"] == as_bits(row["trainer_logprobs"]) for row in rows)
    assert any(row["trainer_logprobs_bits"] != row["sampler_logprobs_bits"] for row in rows)
    assert {row["version"] for row in rows} == {0}
    # At the weights that sampled there is no difference, and those are the columns that say so.
    assert all(row["exact_logprobs_bits"] == row["sampler_logprobs_bits"] for row in rows)
    assert all(row["exact_logprobs_bits"] == as_bits(row["exact_logprobs"]) for row in rows)


def sampled(loss: LossSection | None = None) -> tuple[Policy, Sampled]:
    """Of a step whose trainer was given other rollouts than it compared: some are empty, some were not chosen."""
    trainer = make_trainer(loss=loss)
    policy = trainer.policy
    rollouts = shifted(make_rollouts(policy, (3, 1, 5, 8)))
    empty = replace(rollouts[0], request=7, completion=[], logprobs=torch.zeros(0))
    unused = replace(rollouts[1], request=8)
    given = [rollouts[3], empty, *rollouts[:3]]
    everything = [unused, *given]
    trainer.step(given, some_advantages(5))
    scores = Scores([0.25] * 6, [0.5] * 6, [False] * 6, 0, 0, 0, 0, "")
    advantages = some_advantages(5)
    decode = load_tokenizer("tiny").decode
    return policy, Sampled(everything, scores, given, advantages, trainer.scored, None, decode)


def test_rows_find_their_own_logprobs_and_advantage_whatever_was_dropped(tmp_path: Path) -> None:
    policy, step = sampled()
    rows = rows_of(write_rollouts(tmp_path / "rollouts", 12, step))
    assert [(row["request"], row["sample"]) for row in rows] == [each.id for each in step.rollouts]
    unused, last, empty, *others = rows
    assert unused["trainer_logprobs"] is unused["trainer_logprobs_bits"] is unused["advantage"] is None
    assert empty["completion_ids"] == empty["sampler_logprobs"] == [] and empty["advantage"] is not None
    for row, rollout in zip([last, *others], [step.trained[0], *step.trained[2:]], strict=True):
        expected = policy.logprobs([rollout.scored]).logprob
        assert_same_bits(torch.tensor(row["trainer_logprobs"], dtype=torch.float32), expected)
        assert_same_bits(torch.tensor(row["sampler_logprobs"], dtype=torch.float32), rollout.logprobs)
        assert row["trainer_logprobs_bits"] == expected.view(torch.int32).tolist() != row["sampler_logprobs_bits"]
    assert [row["advantage"] for row in rows[1:]] == step.advantages.tolist()
    assert (unused["reward"], unused["reward_unflipped"]) == (0.25, 0.5)


def test_where_only_a_first_mini_batch_was_compared_the_others_are_null() -> None:
    policy, step = sampled(LossSection(mini_batches=2))
    by_id = scored_of(step.trained, step.scored)
    kept = sorted(each.id for each in step.trained if each.completion)
    assert sorted(by_id) == kept[:2]
    for rollout in step.trained:
        if rollout.id in by_id:
            assert_same_bits(by_id[rollout.id], policy.logprobs([rollout.scored]).logprob)
    assert [len(pair[0]) for pair in step.gap()] == [len(by_id[each]) for each in kept[:2]]


def test_whether_rollouts_are_kept_is_a_key_that_changes_no_bit(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "a", tmp_path / "reward.py", steps=2, checkpoint=CheckpointSection())
    kept = run(recipe)
    other = run(replace(recipe, run=replace(recipe.run, folder=str(tmp_path / "b"), rollouts="never")))
    assert not (other.folder / "rollouts").exists()
    assert kept.lines[-1]["fingerprint"] == other.lines[-1]["fingerprint"]


def test_without_pyarrow_a_run_that_must_keep_rollouts_is_refused_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recipe = small_recipe(tmp_path / "run", tmp_path / "reward.py")
    assert not wanted(recipe)
    always = replace(recipe, run=replace(recipe.run, rollouts="always"))
    with pytest.raises(RunError) as caught:
        run(always)
    assert str(caught.value) == "run.rollouts = always: pyarrow is not installed: pip install 'vexact[data]'"
    assert not (tmp_path / "run").exists()
