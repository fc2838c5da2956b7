"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, each an extra and imported when asked for.

A logger gets numbers after they were computed and gives nothing back, so it cannot change a bit; and it never ends a
run: the first time that one fails is one line of warning, and it is asked no more.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from vexact.loop.folder import RunError, write_whole
from vexact.recipe import Recipe

WANDB_FILE = "wandb.json"  # in the run folder: the id under which a run that is taken up goes on


class Logger(Protocol):
    """Takes the numbers of a step, by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder's `tensorboard`. Steps from `step` on that an earlier attempt left are hidden."""

    def __init__(self, folder: Path, recipe: Recipe, step: int) -> None:
        module = imported("tensorboard", "torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        if step == 0:
            self._writer.add_text("config", f"```yaml\n{recipe.to_yaml()}```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of W&B, whose settings (project, mode, key) are its own affair: its environment variables and files."""

    def __init__(self, folder: Path, recipe: Recipe, step: int) -> None:
        module = imported("wandb", "wandb")
        file = folder / WANDB_FILE
        known = json.loads(file.read_text(encoding="utf-8"))["id"] if file.is_file() else None
        self._run = module.init(
            id=known, resume="allow", name=folder.name, dir=str(folder), config=yaml.safe_load(recipe.to_yaml())
        )
        write_whole(file, json.dumps({"id": self._run.id}) + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, Callable[[Path, Recipe, int], Logger]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Loggers:
    """Those of a recipe."""

    def __init__(self, folder: Path, recipe: Recipe, step: int, warn: Callable[[str], None]) -> None:
        """step: the first that will be logged. Raises RunError where a package is missing, and for nothing else."""
        self._warn = warn
        self._loggers: dict[str, Logger] = {}
        for name in dict.fromkeys(recipe.run.loggers):
            self._guarded(name, partial(self._add, name, folder, recipe, step))

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        """What of a line is a finite number."""
        for name, logger in list(self._loggers.items()):
            self._guarded(name, partial(logger.log, step, numbers(line)))

    def close(self) -> None:
        for name, logger in list(self._loggers.items()):
            self._guarded(name, logger.close)

    def _add(self, name: str, folder: Path, recipe: Recipe, step: int) -> None:
        self._loggers[name] = KINDS[name](folder, recipe, step)

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except RunError:
            raise
        except Exception as error:  # whatever a library may raise
            self._loggers.pop(name, None)
            self._warn(f"{name}: no more metrics go there ({type(error).__name__}: {' '.join(str(error).split())})")


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """A copy of the finite numbers of a line; true and false are none."""
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def check_loggers(recipe: Recipe) -> None:
    """Raises RunError where a package of a logger is missing."""
    for name in recipe.run.loggers:
        imported(name, "torch.utils.tensorboard" if name == "tensorboard" else name)


def imported(extra: str, module: str) -> Any:
    """Raises RunError where the module is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(f"run.loggers: {extra} is not installed ({error}): pip install 'vexact[{extra}]'") from None
