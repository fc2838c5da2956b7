"""From an arm and a seed to the recipe that is run, its digest, and the start that it shares with others.

The start: the recipe's supervised warm start, run once with no step of reinforcement behind it. What its trained model
depends on is all that its digest covers, so arms that differ in anything else begin with the same weights. Runs then
take it as the model they begin with.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vexact import __version__
from vexact.experiments.study import Arm, Study, StudyError
from vexact.loop.resume import changes_no_bit
from vexact.model.checkpoint import TOKENIZER_FILES
from vexact.model.config import DTYPES, ModelConfig
from vexact.model.digest import arithmetic_digest
from vexact.model.tiny import named_config
from vexact.recipe import ModelSection, Recipe, RunSection, SamplingSection, WarmStartSection, leaves
from vexact_kernels import Kernels

RUNS, STARTS = "runs", "starts"
MEASURED = ("run.diagnose",)  # changes no bit of a run, but what can be read off it


@dataclass(frozen=True)
class Job:
    """One run. index: of its seed in the study. digest: names its folder. keeps: whether its rollouts stay."""

    arm: str
    seed: int
    index: int
    digest: str
    recipe: Recipe
    every: int = 0
    keeps: bool = False
    keeps_model: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run.folder)


def start_of(study: Study, plain: Recipe, recipe: Recipe) -> Recipe | None:
    """The recipe of the start that an arm's recipe shares; None where it has no warm start. plain: that of no arm.

    The seed is that of the run, or the study's first where all share one start.
    """
    if not recipe.warm_start.steps:
        return None
    looks = replace(recipe.eval, every=0, best=False) if recipe.warm_start.until else replace(plain.eval, items=0)
    return Recipe(
        name="start",
        seed=study.seeds[0] if study.warm_start == "shared" else recipe.seed,
        steps=0,
        device=recipe.device,
        profile=recipe.profile,
        model=ModelSection(recipe.model.path, plain.model.dtype),
        task=replace(recipe.task, reward=replace(recipe.task.reward, flip=0.0)),
        sampling=SamplingSection(max_tokens=recipe.sampling.max_tokens, pages=recipe.sampling.pages),
        optimizer=replace(plain.optimizer, lr=recipe.warm_start.lr, schedule="constant", warmup=0),
        warm_start=recipe.warm_start,
        eval=looks,
    )


def plan(study: Study, root: Path, kernels: Kernels) -> tuple[list[Job], list[Job]]:
    """The starts and the runs of a study, those of one seed together: a study that is stopped has whole comparisons.

    Arms that come to the same recipe share its runs. root: the study's folder. Raises StudyError for a null arm that
    does: it would say that chance does nothing.
    """
    plain = study.recipe()
    starts: dict[str, Job] = {}
    runs: list[Job] = []
    owners: dict[str, Arm] = {}
    recipes = {arm.name: study.recipe(arm) for arm in study.arms}
    for index, seed in enumerate(study.seeds):
        for arm in study.arms:
            recipe = replace(recipes[arm.name], seed=seed + arm.seed_offset)
            start = _start_job(study, plain, recipe, root, kernels)
            if start is not None:
                starts.setdefault(start.digest, start)
            run = _run_job(study, arm, index, recipe, start, root, kernels)
            other = owners.setdefault(run.digest, arm)
            if other is not arm and "null" in (arm.role, other.role):
                raise StudyError(f"{study.file}: arm {arm.name} with seed {seed} is a run of arm {other.name}")
            runs.append(run)
    return list(starts.values()), runs


def _start_job(study: Study, plain: Recipe, recipe: Recipe, root: Path, kernels: Kernels) -> Job | None:
    first = start_of(study, plain, recipe)
    if first is None:
        return None
    digest = digest_of(first, kernels)
    run = RunSection(folder=str(root / STARTS / digest), checkpoint=True, rollouts="never")
    return Job("start", first.seed, 0, digest, replace(first, run=run), keeps_model=True)


def _run_job(
    study: Study, arm: Arm, index: int, recipe: Recipe, start: Job | None, root: Path, kernels: Kernels
) -> Job:
    digest = digest_of(recipe, kernels, "" if start is None else start.digest)
    keeps = study.rollouts.of(index)
    rollouts = "always" if keeps else "never"
    folder = str(root / RUNS / digest)
    run = replace(recipe.run, folder=folder, checkpoint=study.keep_models, rollouts=rollouts)
    recipe = replace(recipe, name=digest, run=run, eval=replace(recipe.eval, best=False))
    if start is not None:
        model = replace(recipe.model, path=str(start.folder / "checkpoint"))
        recipe = replace(recipe, model=model, warm_start=WarmStartSection())
    return Job(arm.name, study.seeds[index], index, digest, recipe, study.rollouts.every, keeps, study.keep_models)


def digest_of(recipe: Recipe, kernels: Kernels, start: str = "") -> str:
    """Sixteen hexadecimal digits over all that a run's bits follow from: every key of the recipe that is not at its
    default, but for those that change no bit; what is in the files that it names; the arithmetic's digest; the start's;
    this package's version. What a reward function imports, and a change of this package within a version, is not seen.
    """
    content: list[Any] = [kept_keys(recipe), arithmetic_digest(kernels, dtype_of(recipe)), start, __version__]
    files = [_sha256(path, path.stat().st_mtime_ns) for path in files_of(recipe)]
    content += [files] if files else []
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def files_of(recipe: Recipe) -> list[Path]:
    """What a run reads beside its recipe: its model and tokenizer, a task's rows, a reward function's source."""
    folder, options = Path(recipe.model.path), recipe.task.options
    model: list[Path] = []
    if not named_config(recipe.model.path):
        named = {*folder.glob("*.safetensors"), *folder.glob("*.json"), *(folder / name for name in TOKENIZER_FILES)}
        model = sorted(named)
    rows = [Path(str(options[key])) for key in ("path", "held_out_path") if options.get(key)]
    return [path for path in (*model, *rows, *_sources(recipe.task.reward.function)) if path.is_file()]


def _sources(function: str) -> list[Path]:
    """The file of `module:function` or `file.py:function`."""
    module, _, _ = function.rpartition(":")
    if module.endswith(".py") or not module:
        return [Path(module)] if module else []
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # whoever runs it says so
        return []
    return [Path(spec.origin)] if spec is not None and spec.origin else []


@lru_cache(maxsize=256)
def _sha256(path: Path, changed: int) -> str:
    """changed: when it last was, in ns, so that a file is read once."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            found.update(part)
    return found.hexdigest()


def kept_keys(recipe: Recipe) -> dict[str, Any]:
    """Dotted key → value. Keys at their defaults are left out, so that a key that is new renames no run."""
    default = dict(leaves(asdict(Recipe())))
    return {
        key: value
        for key, value in leaves(asdict(recipe))
        if (key not in default or repr(default[key]) != repr(value))
        and (key in MEASURED or not changes_no_bit(key, recipe))
    }


def dtype_of(recipe: Recipe) -> Any:
    """The torch dtype that a recipe computes in."""
    named = DTYPES.get(recipe.model.dtype)
    if named is not None:
        return named
    return (named_config(recipe.model.path) or ModelConfig.from_folder(recipe.model.path)).dtype
