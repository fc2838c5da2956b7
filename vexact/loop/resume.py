"""When a run may be taken up: its recipe is the one that it began with, but for keys that change no bit of it.

A run is a function of its recipe. So a folder that holds a run of an equal recipe is simply continued: what comes out
is what one uninterrupted run would have given. Everything else is refused by the name of the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vexact.loop.folder import CONFIG, RunError, holds_run, newest_state, read_result, step_of
from vexact.recipe import Recipe, leaves, load_recipe
from vexact.study.causes.registry import BY_SCHEDULE

# How a run is computed: an engine that is exact gives the same bits however it is, a real cause may not.
SCHEDULE = (
    "device",  # in the portable profile: the arithmetic digest is compared as well
    "sampling.tokens_per_step", "sampling.chunk", "sampling.running", "sampling.pages", "optimizer.tokens_at_once",
)  # fmt: skip
# Keys and sections that may differ when a run is taken up.
ALLOWED = (
    "name", "run", "checkpoint",  # where a run lies and what it leaves beside its metrics
    "optimizer.recompute", *SCHEDULE,
)  # fmt: skip
STEPS = "steps"  # may grow, unless the learning rate depends on it


def load_run(path: Path, overrides: Sequence[str] = (), also: Sequence[Path] = ()) -> Recipe:
    """The recipe of a file, or of a run folder that is then continued. also: files laid over it. Raises RecipeError."""
    if not path.is_dir():
        return load_recipe(path, overrides, also)
    return load_recipe(path / CONFIG, [*overrides, "--run.folder", str(path)], also)


def is_done(recipe: Recipe, path: Path) -> bool:
    """Whether the run in a folder has come to the recipe's end."""
    return read_result(path).get(STEPS) == recipe.steps


def check_same(recipe: Recipe, path: Path) -> bool:
    """Whether the folder holds a run, which this recipe then continues.

    Raises RunError naming the first key that differs, or where more steps are done than the recipe has.
    """
    if not holds_run(path):
        return False
    file = path / CONFIG
    before = load_recipe(file)
    for key, (old, new) in differences(before, recipe).items():
        if not allowed(key, recipe):
            raise RunError(f"{file}: the run there has {key} = {old!r}, not {new!r}; choose another --run.folder")
    latest = newest_state(path)
    done = max(int(read_result(path).get(STEPS, 0)), 0 if latest is None else step_of(latest))
    if done > recipe.steps:
        raise RunError(f"{path}: {done} steps are done there, {STEPS} = {recipe.steps} asks for fewer")
    return True


def differences(a: Recipe, b: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key → both values, of the keys that differ."""
    left, right = dict(leaves(asdict(a))), dict(leaves(asdict(b)))
    return {
        key: (left.get(key), right.get(key)) for key in [*left, *right] if _text(left.get(key)) != _text(right.get(key))
    }


def allowed(key: str, recipe: Recipe) -> bool:
    """Whether a run may be taken up with another value of a key."""
    if key == STEPS:
        return getattr(recipe.optimizer, "schedule", "constant") == "constant"
    return changes_no_bit(key, recipe)


def changes_no_bit(key: str, recipe: Recipe) -> bool:
    """Whether a run of the recipe has the same weights with another value of a key. Those of SCHEDULE do change some
    causes, as another engine's sums go by what is computed at once."""
    if recipe.mismatch.cause in BY_SCHEDULE and key in SCHEDULE:
        return False
    return any(key == name or key.startswith(f"{name}.") for name in ALLOWED)


def _text(value: Any) -> str:
    return repr(value)  # 1 and 1.0 and true are not the same; nan is itself
