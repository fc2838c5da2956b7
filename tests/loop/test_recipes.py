"""The recipes of the project do what they say, on the models that are here and on random weights of others' shape."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vexact.loop import train
from vexact.model.checkpoint import save_folder
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.recipe import LossSection, Recipe, RunSection, TaskSection, load_recipe
from vexact.verification.checks import thread_count
from vexact_kernels import load

RECIPES = Path(__file__).parents[2] / "recipes"
# Of Qwen3: width, heads, feed-forward. One layer and a small alphabet stand for many and a large one.
SHAPES = {"0.6b": (1024, 16, 3072), "1.7b": (2048, 16, 6144)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


def lines(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    recipe = replace(recipe, run=RunSection(folder=str(folder), checkpoint=False))
    return train(recipe, kernels=load(), console=Console(file=io.StringIO())).lines


def test_reinforcement_raises_the_held_out_success_of_tiny_modsum_by_twenty_points(tmp_path: Path) -> None:
    """A run has the same bits everywhere, so this is no matter of luck. The recipe itself goes on for longer."""
    found = lines(load_recipe(RECIPES / "tiny_modsum.yaml", ["--steps", "50", "--eval.every", "0"]), tmp_path / "run")
    before, after = found[0]["eval_success"], found[-1]["eval_success"]
    assert 0.5 <= before < 0.6
    assert after >= before + 0.2
    assert all(line["mismatch_tokens"] == 0 for line in found[1:])


def test_solutions_alone_teach_the_tiny_model_sums_that_it_never_saw(tmp_path: Path) -> None:
    found = lines(load_recipe(RECIPES / "tiny_modsum_sft.yaml", ["--eval.every", "0"]), tmp_path / "run")
    assert (found[0]["eval_success"], found[-1]["step"]) == (0.0, 149)
    assert found[-1]["eval_success"] > 0.95


@pytest.mark.parametrize(("size", "objective"), [("0.6b", "reinforce"), ("1.7b", "grpo")])
def test_the_recipes_of_qwen3_train_random_weights_of_their_shape(size: str, objective: str, tmp_path: Path) -> None:
    width, heads, inner = SHAPES[size]
    of_qwen3: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    config = tiny_config(**of_qwen3, intermediate_size=inner, num_hidden_layers=1)
    weights = {name: weight.bfloat16() for name, weight in tiny_weights(config).items()}
    save_folder(tmp_path / "model", config, weights)
    recipe = load_recipe(RECIPES / f"qwen3_{size}_{objective}.yaml")
    small = replace(recipe.sampling, prompts=4, samples=3, max_tokens=4, pages=0)
    recipe = replace(
        recipe,
        steps=1,
        device="cpu",
        profile="portable",
        model=replace(recipe.model, path=str(tmp_path / "model")),
        task=TaskSection(name="chain_sum", options={"shots": 0}, held_out=0.1),
        sampling=small,
        eval=replace(recipe.eval, items=2, n=2, best=False),
        checkpoint=replace(recipe.checkpoint, every=0),
    )
    before, after = lines(recipe, tmp_path / "run")
    assert "eval_pass_at_2" in before
    assert (after["mismatch_tokens"], after["tokens"] > 20) == (0, True)
    assert (after["objective"], after["aggregation"]) == (recipe.loss.name, recipe.loss.aggregation)


def test_the_recipes_of_qwen3_differ_in_size_alone() -> None:
    for objective in ("grpo", "reinforce"):
        small, large = (load_recipe(RECIPES / f"qwen3_{size}_{objective}.yaml") for size in SHAPES)
        assert replace(small, name=large.name, model=large.model) == large
    grpo, reinforce = (load_recipe(RECIPES / f"qwen3_0.6b_{name}.yaml").loss for name in ("grpo", "reinforce"))
    assert (grpo.epsilon_high, grpo.mini_batches, grpo.loss_scale_factor) == (0.28, 4, 8192)
    assert reinforce == LossSection(name="reinforce", advantage="batch_token")
