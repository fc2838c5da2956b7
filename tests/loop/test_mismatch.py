"""Whole runs with mismatch: what stays equal, what parts and where, and that a stop changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runs import bytes_of, lines_of, run, small_recipe, states_of
from vexact.recipe import CheckpointSection, LossSection, MismatchSection, OptimizerSection, Recipe, SyncSection

REINFORCE = LossSection(name="reinforce", advantage="batch_sequence")


def recipe_of(tmp_path: Path, name: str, **changes: Any) -> Recipe:
    mismatch = MismatchSection(**changes.pop("mismatch", {}))
    defaults = {"sync": SyncSection(), "delay": 0, "loss": REINFORCE, "checkpoint": CheckpointSection(),
                "optimizer": OptimizerSection(lr=1e-3)}  # fmt: skip
    return small_recipe(tmp_path / name, tmp_path / "odd.py", mismatch=mismatch, **{**defaults, **changes})


def fingerprints(recipe: Recipe) -> list[str]:
    run(recipe)
    return [line["fingerprint"] for line in lines_of(Path(recipe.run.folder)) if line["step"] >= 0]


@pytest.mark.parametrize("site", ["logits", "hidden", "kv", "weights", "record"])
def test_noise_of_size_zero_ends_in_the_same_weights(tmp_path: Path, site: str) -> None:
    exact = fingerprints(recipe_of(tmp_path, "exact"))
    side = "sampler" if site == "record" else "both-independent"
    zero = recipe_of(tmp_path, "zero", mismatch={"site": site, "side": side})
    assert fingerprints(zero) == exact
    assert all(line["tim/differing"] == 0 for line in lines_of(tmp_path / "zero"))


def test_noise_on_the_record_moves_no_weight_of_reinforce_and_those_of_ppo(tmp_path: Path) -> None:
    for name, loss, same in (("reinforce", REINFORCE, True), ("ppo", LossSection(), False)):
        exact = fingerprints(recipe_of(tmp_path, f"{name}-exact", loss=loss))
        record = fingerprints(recipe_of(tmp_path, name, loss=loss, mismatch={"site": "record", "sigma": 0.3}))
        assert (record == exact) == same
        assert all(line["tim/k3"] > 0 for line in lines_of(tmp_path / name))


@pytest.mark.parametrize("site", ["logits", "attention", "weights"])
@pytest.mark.parametrize("lag", [{}, {"sync": SyncSection(2), "delay": 1}], ids=["fresh", "older"])
def test_shared_noise_is_noise_without_mismatch(tmp_path: Path, site: str, lag: dict[str, Any]) -> None:
    for side, differ in (("both-shared", False), ("sampler", True)):
        recipe = recipe_of(tmp_path, side, mismatch={"site": site, "sigma": 0.1, "side": side}, **lag)
        assert fingerprints(recipe) != fingerprints(recipe_of(tmp_path, f"{side}-exact", **lag))
        lines = lines_of(tmp_path / side)
        assert all((line["tim/differing"] > 0) == differ for line in lines)
        assert all((line["tim/k3"] > 0) == differ for line in lines)


def test_arms_part_at_the_step_that_switches_noise_on(tmp_path: Path) -> None:
    exact = fingerprints(recipe_of(tmp_path, "exact"))
    late = fingerprints(recipe_of(tmp_path, "late", mismatch={"site": "logits", "sigma": 0.5, "start": 3, "stop": 5}))
    assert late[:3] == exact[:3]
    assert late[3] != exact[3]
    sizes = [line["mismatch_sigma"] for line in lines_of(tmp_path / "late")]
    assert sizes == [0, 0, 0, 0.5, 0.5, 0]
    differing = [line["tim/differing"] > 0 for line in lines_of(tmp_path / "late")]
    assert differing == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    "mismatch",
    [{"preset": "fp8"}, {"site": "weights", "k3": 1e-2}, {"site": "hidden", "k3": 1e-2, "hold": "k3"}],
    ids=str,
)
def test_a_dose_is_solved_before_the_first_step_and_survives_a_stop(tmp_path: Path, mismatch: dict[str, Any]) -> None:
    changes = {"mismatch": mismatch, "sync": SyncSection(2), "checkpoint": CheckpointSection(every=1, keep=9)}
    whole = recipe_of(tmp_path, "whole", **changes)
    run(whole)
    before = lines_of(tmp_path / "whole")[0]
    target = {"fp8": 3e-3}.get(mismatch.get("preset", ""), 1e-2)
    assert before["step"] == -1
    assert before["mismatch_divergence"] == pytest.approx(target, rel=0.01)
    stopped = recipe_of(tmp_path, "stopped", **changes)
    run(replace(stopped, steps=3))
    run(stopped)
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "whole")
    assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "whole")
    assert states_of(tmp_path / "stopped") == states_of(tmp_path / "whole")


def test_trainer_noise_is_seen_by_the_trainer_alone(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "trainer", mismatch={"site": "hidden", "sigma": 0.1, "side": "trainer"})
    assert fingerprints(recipe)[0] != fingerprints(recipe_of(tmp_path, "exact"))[0]
    first, exact = (lines_of(tmp_path / name)[0] for name in ("trainer", "exact"))
    assert first["tim/differing"] > 0
    assert first["reward_mean"] == exact["reward_mean"]


@pytest.mark.parametrize("noisy", [False, True])
def test_under_mismatch_every_token_is_measured_though_bypass_scores_none(tmp_path: Path, noisy: bool) -> None:
    mismatch = {"site": "logits", "sigma": 0.1} if noisy else {}
    recipe = recipe_of(tmp_path, "run", mismatch=mismatch, loss=LossSection(anchor="bypass", mini_batches=2))
    fingerprints(recipe)
    for line in lines_of(tmp_path / "run"):
        assert (line["mismatch_compared"] == line["tokens"]) == noisy
        assert (line["mismatch_tokens"] > 0) == noisy


def test_noise_on_gradients_is_no_mismatch(tmp_path: Path) -> None:
    mismatch = {"site": "gradients", "sigma": 0.5, "side": "trainer"}
    assert fingerprints(recipe_of(tmp_path, "noisy", mismatch=mismatch)) != fingerprints(recipe_of(tmp_path, "exact"))
    assert all(line["tim/differing"] == 0 for line in lines_of(tmp_path / "noisy"))
