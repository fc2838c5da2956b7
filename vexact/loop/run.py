"""One attempt at a run: it begins at the newest state of its folder, and leaves metrics, rollouts and states there.

Every rank makes the same calls in the same order; the first alone writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from vexact.loop.folder import RunFolder, remove_folder
from vexact.loop.loggers import Loggers, check_loggers
from vexact.loop.names import named
from vexact.loop.rollouts import Sampled, wanted, write_rollouts
from vexact.loop.state import Progress, Restored, restore, save_state
from vexact.model.policy import Policy
from vexact.model.tiny import named_config
from vexact.ranks import Ranks
from vexact.recipe import Recipe
from vexact.study.metrics import measure_gap
from vexact.training.trainer import Trainer


def check_extras(recipe: Recipe) -> None:
    """Raises RunError where a package is missing that the recipe's run section asks for."""
    check_loggers(recipe)
    wanted(recipe)


class Run:
    """path: as `run_path` gave it, the same on all ranks; it becomes the run folder. warn: hears a line at a time."""

    def __init__(self, path: Path, recipe: Recipe, ranks: Ranks, warn: Callable[[str], None]) -> None:
        """Makes the folder. Raises RunError where another process is running in it."""
        self.path, self.recipe, self.ranks, self._warn = path, recipe, ranks, warn
        self._keeps_rollouts = wanted(recipe)
        self._open = ExitStack()
        self._loggers: Loggers | None = None
        self._folder: RunFolder | None = None
        self._state: Path | None = ranks.from_first(self._make)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def state(self) -> Path | None:
        """Of the newest state; None where the run begins at its beginning."""
        return self._state

    def take_up(self, trainer: Trainer) -> Restored | None:
        """Put the newest state into the trainer, and take back what later steps left. None where there is none.

        Raises StateError naming a damaged file.
        """
        restored = None if self._state is None else restore(self._state, trainer)
        progress = Progress(0) if restored is None else restored.progress
        fingerprint = trainer.fingerprint()
        if self._folder is not None:
            self._folder.rewind(progress.step, progress.logs)
            self._folder.write_environment(trainer.policy, fingerprint, progress.step)
            # Loggers count steps that are done: 0 is what came before the first.
            self._loggers = Loggers(self.path, self.recipe, progress.step + 1 if restored else 0, self._warn)
            self._open.callback(self._loggers.close)
        return restored

    def lines(self) -> list[dict[str, Any]]:
        """Of the steps that are done, on the first rank."""
        return [] if self._folder is None else self._folder.lines()

    def stepped(self, line: Mapping[str, Any], sampled: Sampled | None) -> dict[str, Any]:
        """Log a step. Returns its line as metrics.jsonl has it: with `tim/*` and the names that dashboards know.

        sampled: None where the line is of what came before the first step.
        """
        whole = dict(line)
        if sampled is not None:
            mismatch = sampled.discrepancy
            whole = named(line, mismatch, mismatch if sampled.replayed is None else measure_gap(sampled.gap()))
        if self._folder is not None:
            if self._keeps_rollouts and sampled is not None:
                write_rollouts(self._folder.rollouts, line["step"], sampled)
            self._folder.append(whole)
        if self._loggers is not None:
            self._loggers.log(line["step"] + 1, whole)
        return whole

    def keep(self, trainer: Trainer, done: int, loop: Mapping[str, Any], policies: Mapping[str, Policy]) -> None:
        """Write a state behind `done` steps where one is due. loop, policies: what `take_up` will give back."""
        section = self.recipe.checkpoint
        nothing_yet = done == 0 and not self.recipe.warm_start.steps
        if not section.every or done % section.every or nothing_yet:
            return
        logs = {} if self._folder is None else self._folder.log_sizes()
        folder = self.path if self._folder is None else self._folder.state(done)
        save_state(folder, trainer, Progress(done, loop, logs), policies, tokenizer_source(self.recipe))
        if self._folder is not None:
            self._folder.prune(section.keep)

    def finish(self, trainer: Trainer, save: Callable[[Path], None]) -> None:
        """The last step is done. save: writes the trained model into a new folder."""
        fingerprint = trainer.fingerprint()
        if self._folder is None:
            return
        remove_folder(self._folder.checkpoint)
        if self.recipe.run.checkpoint:
            save(self._folder.checkpoint)
        self._folder.finish(
            {"steps": self.recipe.steps, "version": trainer.policy.version, "weights_fingerprint": fingerprint}
        )

    def _make(self) -> Path | None:
        self._folder = self._open.enter_context(RunFolder(self.path, self.recipe))
        return self._folder.latest()


def tokenizer_source(recipe: Recipe) -> str | None:
    """The folder whose tokenizer's files go with the model; None for the project's own small models."""
    return None if named_config(recipe.model.path) else recipe.model.path
