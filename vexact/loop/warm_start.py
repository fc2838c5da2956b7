"""A supervised start: steps of `supervised.py` until it is enough.

The optimizer is of this start's own; reinforcement begins with fresh moments and as version 0. A run that is stopped
inside it begins anew: where it is long, it is better a run of its own, `objective: sft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vexact.loop.questions import Questions
from vexact.loop.supervised import learn
from vexact.recipe import OptimizerSection, Recipe
from vexact.training.metrics import StepMetrics
from vexact.training.trainer import Trainer


def supervised_optimizer(recipe: Recipe) -> OptimizerSection:
    """The recipe's, at the start's own constant rate."""
    return replace(recipe.optimizer, lr=recipe.warm_start.lr)


@dataclass
class WarmStart:
    """trainer: one of CROSS_ENTROPY and `supervised_optimizer`. success: measures its policy on held-out questions.

    say: hears a line at each look. Without `until` nothing is measured.
    """

    recipe: Recipe
    questions: Questions
    trainer: Trainer
    success: Callable[[], float]
    say: Callable[[str], None]

    def run(self) -> dict[str, Any]:
        """Train until it is enough; what became of it, by the names of metrics.jsonl."""
        section, done, loss = self.recipe.warm_start, 0, float("nan")
        enough = self._enough(done, loss)
        while done < section.steps and not enough:
            metrics = self.step(done)
            done, loss = done + 1, metrics.loss
            if done % section.every == 0 or done == section.steps:
                enough = self._enough(done, loss)
        if section.until and not enough:
            self.say(f"warm start: {done} steps did not reach a success of {section.until}")
        return {"warm_start_steps": done, "warm_start_loss": loss}

    def step(self, step: int) -> StepMetrics:
        """One step of cross-entropy."""
        return learn(self.trainer, self.questions, step, self.recipe.warm_start.sequences)

    def _enough(self, done: int, loss: float) -> bool:
        section = self.recipe.warm_start
        said = f"warm start {done}/{section.steps}" + (f"  loss {loss:.3f}" if done else "")
        if not section.until:
            self.say(said)
            return False
        success = self.success()
        self.say(f"{said}  held-out success {success:.3f}")
        return success >= section.until
