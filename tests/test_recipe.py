"""A recipe is read strictly: a key or value that is not understood is refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from vexact.recipe import KLSection, LossSection, Recipe, RecipeError, RemedySection, leaves, load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_what_a_file_leaves_out_is_the_default(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, "")) == Recipe()
    assert load_recipe(written(tmp_path, "sampling:\nsteps: 7")) == Recipe(steps=7)


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "steps: 7\noptimizer:\n  lr: 1e-5\n  beta1: 0.5")
    recipe = load_recipe(path, ["--optimizer.lr", "3e-6", "--model.path=models/some"])
    assert (recipe.steps, recipe.optimizer.lr, recipe.optimizer.beta1, recipe.model.path) == (
        7,
        3e-6,
        0.5,
        "models/some",
    )
    assert load_recipe(path, {"optimizer.lr": "3e-6", "model.path": "models/some"}) == recipe


def test_a_section_inside_a_section_is_written_like_any_other(tmp_path: Path) -> None:
    path = written(tmp_path, "loss:\n  name: gspo\n  kl:\n    coef: 0.04\n    estimator: k3")
    recipe = load_recipe(
        path, ["--loss.kl.place=reward", "--loss.kl.estimator", "k1", "--loss.remedy.sequence=rejection"]
    )
    assert recipe.loss == LossSection(
        name="gspo", kl=KLSection(0.04, "k1", "reward"), remedy=RemedySection(sequence="rejection")
    )
    assert load_recipe(written(tmp_path, recipe.to_yaml())) == recipe


def test_numbers_and_words_take_the_type_of_their_key(tmp_path: Path) -> None:
    recipe = load_recipe(
        written(tmp_path, ""), ["--optimizer.max_grad_norm", "2", "--name", "17", "--run.checkpoint", "no"]
    )
    assert recipe.optimizer.max_grad_norm == 2.0 and isinstance(recipe.optimizer.max_grad_norm, float)
    assert recipe.name == "17"
    assert recipe.run.checkpoint is False


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_a_resolved_recipe_is_read_back_as_itself(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml", ["--optimizer.lr", "1e-07"])
    assert recipe.name == name
    assert load_recipe(written(tmp_path, recipe.to_yaml())) == recipe


def test_keys_of_somebody_elses_are_kept_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, "task:\n  options:\n    a: 1\n    deep: {b: [2]}\n  reward:\n  chat_template_kwargs:\n")
    recipe = load_recipe(path, ["--task.options.a", "3", "--task.chat_template_kwargs", "{enable_thinking: false}"])
    assert recipe.task.options == {"a": 3, "deep": {"b": [2]}}
    assert recipe.task.chat_template_kwargs == {"enable_thinking": False}
    assert recipe.task.reward == Recipe().task.reward
    assert load_recipe(written(tmp_path, recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [("wandb", ("wandb",)), ("[tensorboard, wandb]", ("tensorboard", "wandb")), ("", ()), ("[]", ())],
)
def test_a_list_of_words_may_have_one_or_none(text: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, ""), ["--run.loggers", text])
    assert recipe.run.loggers == expected
    assert load_recipe(written(tmp_path, recipe.to_yaml())) == recipe


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Recipe().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer.lrr", "1"], "--optimizer.lrr: unknown key optimizer.lrr; did you mean optimizer.lr?"),
        (["--lr", "1"], "--lr: unknown key lr; did you mean optimizer.lr?"),
        (["--step", "1"], "--step: unknown key step; did you mean steps?"),
        (["--model", "tiny"], "--model: unknown key model; model is a section with keys of its own, as model.path"),
        (["--steps", "x"], "--steps: steps = 'x' is not an integer"),
        (["--steps", "1.5"], "--steps: steps = 1.5 is not an integer"),
        (["--steps", "true"], "--steps: steps = True is not an integer"),
        (["--steps", "-1"], "--steps: steps = -1 is below 0"),
        (["--optimizer.lr", "0"], "--optimizer.lr: optimizer.lr = 0.0 must be above 0"),
        (["--optimizer.lr", "fast"], "--optimizer.lr: optimizer.lr = 'fast' is not a number"),
        (["--optimizer.lr", ".inf"], "--optimizer.lr: optimizer.lr = inf is not finite"),
        (["--optimizer.beta1", "1"], "--optimizer.beta1: optimizer.beta1 = 1.0 must be below 1"),
        (["--model.dtype", "fp8"],
         "--model.dtype: model.dtype = 'fp8' is not one of checkpoint, float32, bfloat16, float16"),
        (["--loss.aggregation", "token_mean"],
         "--loss.aggregation: loss.aggregation = 'token_mean' is not one of "
         "token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm"),
        (["--loss.kl.coeff", "0.2"], "--loss.kl.coeff: unknown key loss.kl.coeff; did you mean loss.kl.coef?"),
        (["--loss.dual_clip", "0.5"], "loss.dual_clip = 0.5 must be above 1, or 0 for none"),
        (["--loss.remedy.token", "tis"],
         "loss.remedy.token = tis with loss.anchor = bypass: the ratio to the sampler that ppo clips holds "
         "that correction already; use loss.anchor = recomputation"),
        (["--loss.kl.estimator", "k1"],
         "loss.kl.estimator = k1 in the loss: log π − log π_ref has the gradient of log π alone, whose mean is 0 "
         "whatever π_ref is: noise and no penalty; use k2 or k3+, or loss.kl.place = reward"),
        (["--warm_start.until", "1.5"], "warm_start.until = 1.5 is a share of completions, must be at most 1"),
        (["--sync.every", "0"], "--sync.every: sync.every = 0 is below 1"),
        (["--sync", "3"], "--sync: unknown key sync; sync is a section with keys of its own, as sync.every"),
        (["--optimizer.schedule", "sine"],
         "--optimizer.schedule: optimizer.schedule = 'sine' is not one of constant, linear, cosine"),
        (["--task.options", "3"], "--task.options: task.options = 3 is not keys and values"),
        (["--task.reward", "3"],
         "--task.reward: unknown key task.reward; task.reward is a section with keys of its own, "
         "as task.reward.function"),
        (["--task.reward.flip", "1"], "--task.reward.flip: task.reward.flip = 1.0 must be below 1"),
        (["--task.option.a", "1"], "--task.option.a: unknown key task.option.a; did you mean task.options?"),
        (["--run.checkpoint", "3"], "--run.checkpoint: run.checkpoint = 3 is not true or false"),
        (["--run.loggers", "tensorbord"],
         "--run.loggers: run.loggers = 'tensorbord' is not one of tensorboard, wandb"),
        (["--run.loggers", "false"], "--run.loggers: run.loggers = False is not a list of tensorboard, wandb"),
        (["--checkpoint.keep", "0"], "--checkpoint.keep: checkpoint.keep = 0 is below 1"),
        (["--run.folder", "[a]"], "--run.folder: run.folder = ['a'] is not text"),
        (["--run.folder", "[a"], "--run.folder: '[a' is not a value"),
        (["--steps"], "--steps: a value is missing"),
        (["steps", "3"], "steps: overrides are written --key value"),
    ],
)  # fmt: skip
def test_a_flag_that_is_not_understood_is_refused_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, ""), words)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer:\n  rate: 1", "unknown key optimizer.rate"),
        ("optimizer: 3", "unknown key optimizer; optimizer is a section"),
        ("steps:\n  many: 3", "unknown key steps.many"),
        ("steps:", "steps = None is not an integer"),
        ("- steps", "holds list, not keys and values"),
        ("steps: [", "is not YAML"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.yaml: no such file"):
        load_recipe(tmp_path / "none.yaml")


def test_leaves_have_dotted_keys_and_an_empty_mapping_is_one() -> None:
    assert dict(leaves({"a": {"b": 1, "c": {"d": 2}}, "e": {}})) == {"a.b": 1, "a.c.d": 2, "e": {}}
