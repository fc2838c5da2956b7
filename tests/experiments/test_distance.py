"""How far runs end from on-policy training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vexact.experiments.distance import distances, divergences, reference
from vexact.experiments.recipes import Job
from vexact.model.checkpoint import save_folder
from vexact.model.tiny import named_config, tiny_weights
from vexact.recipe import ModelSection, Recipe, RunSection, SamplingSection, TaskSection
from vexact_kernels import load


def log(*rows: tuple[float, ...]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(rows, np.float64))


def test_divergences_of_two_coins_are_those_of_the_closed_form() -> None:
    p, q = log((0.5, 0.5)), log((0.9, 0.1))
    kl, js = divergences(p, q)
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert divergences(q, p)[1] == pytest.approx(js) and 0.0 < js < math.log(2.0)
    assert divergences(p, p) == (0.0, 0.0)
    kl, js = divergences(log((1.0, 0.0)), log((0.5, 0.5)))
    assert kl == pytest.approx(math.log(2.0)) and math.isfinite(js)


def ended(folder: Path, arm: str, seed: int, shift: float) -> Job:
    """A run whose trained model is the tiny one with that much more on one embedding."""
    config = named_config("tiny-modsum")
    assert config is not None
    weights = tiny_weights(config)
    weights["model.embed_tokens.weight"][3] += shift
    digest = f"{arm}{seed}"
    save_folder(folder / digest / "checkpoint", config, weights)
    recipe = Recipe(
        seed=seed,
        model=ModelSection("tiny-modsum"),
        task=TaskSection(name="modsum"),
        sampling=SamplingSection(prompts=3, samples=2, max_tokens=6),
        run=RunSection(folder=str(folder / digest)),
    )
    return Job(arm, seed, seed, digest, recipe)


def test_a_run_is_as_far_as_its_policy_in_units_of_on_policy_pairs(tmp_path: Path) -> None:
    exact = [ended(tmp_path, "exact", seed, 0.02 * seed) for seed in range(3)]
    near, far = ended(tmp_path, "near", 1, 0.02), ended(tmp_path, "far", 1, 0.4)
    found = distances(exact, [near, far], load())
    assert found["near1"] == found["exact1"]  # the very weights: its own seed's policy is left out
    assert np.mean([found[job.digest].kl for job in exact]) == pytest.approx(1.0)
    assert found["far1"].kl > 10.0 * found["near1"].kl
    assert found["far1"].js > 10.0 * found["near1"].js


def test_the_on_policy_run_of_a_runs_own_seed_is_left_out(tmp_path: Path) -> None:
    exact = [ended(tmp_path, "exact", seed, 0.02 * seed) for seed in range(2)]
    assert distances(exact, [ended(tmp_path, "as 0", 1, 0.0)], load())["as 01"].kl == 0.0
    assert distances(exact, [ended(tmp_path, "as 1", 1, 0.02)], load())["as 11"].kl > 0.0


def test_the_prefixes_are_those_that_the_next_step_would_have_asked(tmp_path: Path) -> None:
    job = ended(tmp_path, "exact", 0, 0.0)
    kernels = load()
    later = replace(job, recipe=replace(job.recipe, steps=job.recipe.steps + 1))
    asked = [[s.tokens[: s.first] for s in reference(each, kernels).sequences] for each in (job, job, later)]
    assert asked[0] == asked[1] != asked[2]


def test_without_models_or_with_one_on_policy_run_nothing_is_measured(tmp_path: Path) -> None:
    exact = [ended(tmp_path, "exact", seed, 0.0) for seed in range(2)]
    missing = replace(exact[0], digest="x", recipe=replace(exact[0].recipe, run=RunSection(folder=str(tmp_path / "x"))))
    assert distances(exact[:1], [missing], load()) == {}
    assert distances([missing], exact, load()) == {}
    assert distances(exact, [], load()) == {}  # they ended as one and the same: there is no unit
