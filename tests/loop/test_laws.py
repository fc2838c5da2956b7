"""Whole runs that centre scores with what only the draw knew: a stop, other ranks and other micro-batches change
nothing, and without what was kept they would be other runs."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runs import assert_same_run, bytes_of, lines_of, run, small_recipe, states_of
from vexact.loop import train
from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.recipe import (
    LossSection,
    MismatchSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RemedySection,
    RunSection,
    SamplingSection,
    SyncSection,
)
from vexact.study.mismatch import Mismatch
from vexact.training.metrics import StepMetrics
from vexact.training.trainer import Trainer
from vexact.verification.ranks import on_ranks
from vexact_kernels import PAGE, load

REMEDIES = {
    "scores": RemedySection(centre="scores"),
    "dlc": RemedySection(name="dlc", resync_level="sequence"),
    "none": RemedySection(),
}
LONG = SamplingSection(prompts=2, samples=3, max_tokens=PAGE + 10)  # so that there is a second page to split off


def recipe_of(tmp_path: Path, name: str, cause: str, remedy: str, **changes: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": ModelSection("tiny-modsum", "float32"),
        "sampling": LONG,
        "steps": 4,
        "loss": LossSection("reinforce", remedy=REMEDIES[remedy]),
        "sync": SyncSection(2),
        "delay": 0,
        "optimizer": OptimizerSection(lr=3e-3),
        "mismatch": MismatchSection(cause=cause),
    }
    return small_recipe(tmp_path / name, tmp_path / "odd.py", **{**base, **changes})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[Rollout]]:
    """The rollouts of every step."""
    found: list[list[Rollout]] = []
    step = Trainer.step

    def noted(self: Trainer, rollouts: Sequence[Rollout], *rest: Any) -> StepMetrics:
        found.append(list(rollouts))
        return step(self, rollouts, *rest)

    monkeypatch.setattr(Trainer, "step", noted)
    return found


@pytest.mark.parametrize("remedy", ["scores", "dlc"])
@pytest.mark.parametrize("cause", ["split-kv", "torch"])
def test_such_a_run_goes_on_as_if_it_had_not_stopped(
    cause: str, remedy: str, tmp_path: Path, trained: list[list[Rollout]]
) -> None:
    whole, part = (recipe_of(tmp_path, name, cause, remedy) for name in ("whole", "part"))
    run(whole)
    taken_up = lines_of(tmp_path / "whole")[-2]  # the first step behind the stop
    assert taken_up["step"] == 2 and taken_up["tim/differing"] > 0 and taken_up["grad_norm"] > 0
    assert all(rollout.law is not None for rollouts in trained for rollout in rollouts if rollout.completion)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (tmp_path / "part" / "result.json").unlink()
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-000004")
    config = tmp_path / "part" / "config.yaml"
    config.write_text(config.read_text().replace("/whole", "/part"))
    run(part)
    assert_same_run(tmp_path / "part", tmp_path / "whole")


@pytest.mark.parametrize("remedy", ["scores", "dlc"])
def test_such_a_run_does_not_know_how_many_ranks_share_it(remedy: str, tmp_path: Path) -> None:
    """Of split-kv, whose bits follow from what is decoded; torch's follow from the whole batch, so from who samples."""
    one, two = (recipe_of(tmp_path, name, "split-kv", remedy, steps=2) for name in ("one", "two"))
    run(one)

    def shared(ranks: Ranks) -> str:
        train(two, kernels=load(), console=Console(file=io.StringIO()), ranks=ranks)
        return "done"

    assert on_ranks(2, shared) == ["done"] * 2
    assert lines_of(tmp_path / "two") == lines_of(tmp_path / "one")
    assert states_of(tmp_path / "two") == states_of(tmp_path / "one")
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


@pytest.mark.parametrize("cause", ["split-kv", "torch"])
def test_micro_batches_change_no_weight(cause: str, tmp_path: Path) -> None:
    ends = []
    for name, tokens in (("large", 4096), ("small", 1)):
        optimizer = OptimizerSection(lr=3e-3, tokens_at_once=tokens)
        run(recipe_of(tmp_path, name, cause, "scores", steps=2, optimizer=optimizer))
        ends.append([line["fingerprint"] for line in lines_of(tmp_path / name)])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("cause", ["split-kv", "torch"])
def test_a_run_that_computed_the_law_again_would_be_another(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant. What is sampled in the first step is the same."""
    section = RunSection(diagnose=1)
    changes = {name: replace(section, folder=str(tmp_path / name)) for name in ("kept", "computed")}
    run(recipe_of(tmp_path, "kept", cause, "scores", steps=1, run=changes["kept"]))
    monkeypatch.setattr(Mismatch, "keeps_laws", lambda self, step: False)
    run(recipe_of(tmp_path, "computed", cause, "scores", steps=1, run=changes["computed"]))
    kept, computed = (lines_of(tmp_path / name)[-1] for name in ("kept", "computed"))
    assert kept["reward_mean"] == computed["reward_mean"]
    assert kept["fingerprint"] != computed["fingerprint"]
    assert kept["reinforce_norm"] == computed["reinforce_norm"] and kept["drift_norm"] != computed["drift_norm"]


def test_laws_are_kept_where_they_are_read_alone(tmp_path: Path, trained: list[list[Rollout]]) -> None:
    """With a remedy that centres, or in steps that are diagnosed; and in steps that have the cause."""

    def kept(name: str, cause: str, remedy: str, diagnose: int = 0, **keys: Any) -> list[bool]:
        del trained[:]
        section = RunSection(folder=str(tmp_path / name), diagnose=diagnose)
        small = SamplingSection(prompts=2, samples=3, max_tokens=5)
        mismatch = MismatchSection(cause=cause, **keys)
        run(recipe_of(tmp_path, name, cause, remedy, run=section, sampling=small, mismatch=mismatch))
        return [all(rollout.law is not None for rollout in rollouts if rollout.completion) for rollouts in trained]

    assert kept("scores", "torch", "scores") == [True] * 4
    assert kept("window", "torch", "scores", start=1, stop=3) == [False, True, True, False]
    assert kept("plain", "torch", "none") == [False] * 4
    assert kept("known", "bf16-softmax", "scores") == [False] * 4
    assert kept("diagnosed", "torch", "none", diagnose=3) == [True, False, False, True]


@pytest.mark.parametrize("cause", ["torch", "temperature", "raw-logprob", "bf16-softmax"])
def test_what_the_samplers_side_adds_is_told_with_what_it_drew_from(cause: str, tmp_path: Path) -> None:
    """And is no part of the trainer's side."""
    section = RunSection(folder=str(tmp_path / "run"), diagnose=1)
    mismatch = MismatchSection(cause=cause, top_p=0.5, temperature=1.5)
    recipe = recipe_of(tmp_path, "run", cause, "none", run=section, mismatch=mismatch, steps=3, sync=SyncSection())
    run(replace(recipe, sampling=SamplingSection(prompts=4, samples=4, max_tokens=5)))
    lines = [line for line in lines_of(tmp_path / "run") if line["grad_norm"] > 0]  # else rewards were all equal
    assert lines and all(line["drift_norm"] > 0 for line in lines)
    assert all((line["gradient_cosine"], line["gradient_bias"]) == (1.0, 0.0) for line in lines)
