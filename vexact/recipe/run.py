"""Where a run goes, what it leaves there, and how often it can be taken up again."""

from __future__ import annotations

from dataclasses import dataclass

from vexact.recipe.values import choice, number, words


@dataclass(frozen=True)
class RunSection:
    """Where results go. None of this changes a bit of a run."""

    root: str = "runs"
    folder: str = ""  # by default ROOT/NAME-TIME; one that holds a run of this recipe is continued
    checkpoint: bool = True  # save the trained weights at the end
    rollouts: str = choice("auto", "always", "never")  # keep them as parquet; auto: where pyarrow is installed
    diagnose: int = number(0, at_least=0)  # every so many steps say what mismatch does to the gradient; 0: never
    diagnose_batch: int = number(0, at_least=0)  # … and beside a fresh on-policy batch so many times as large; 0: none
    loggers: tuple[str, ...] = words("tensorboard", "wandb")  # besides metrics.jsonl; by default none


@dataclass(frozen=True)
class CheckpointSection:
    """States that a run can be taken up from; vexact/loop/state.py says what they hold."""

    every: int = number(0, at_least=0)  # steps; 0: none, and a run that was stopped begins anew
    keep: int = number(1, at_least=1)  # how many of the newest stay
