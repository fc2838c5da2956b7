"""Learning from a task's own solutions, through the trainer and the step that reinforcement uses.

Each solution is a rollout with advantage 1, and the loss −Σ log π / n over its tokens, `reinforce` with `token-mean`,
is the cross-entropy. Nothing was sampled, so ratios and mismatch have no meaning and are not reported.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from vexact.loop.names import named
from vexact.loop.questions import Questions
from vexact.recipe import LossSection
from vexact.training.metrics import StepMetrics
from vexact.training.trainer import Trainer

CROSS_ENTROPY = LossSection(name="reinforce", aggregation="token-mean")
MEASURED = (
    "version", "skipped", "rollouts", "updates", "tokens", "nonfinite_tokens", "loss", "entropy", "grad_norm",
    "clip_factor",
)  # fmt: skip


def learn(trainer: Trainer, questions: Questions, step: int, count: int) -> StepMetrics:
    """One step of cross-entropy on `count` solutions, which follow from the step alone. trainer: of CROSS_ENTROPY."""
    rollouts = questions.solutions(step, count, trainer.policy)
    return trainer.step(rollouts, torch.ones(len(rollouts)))


def supervised_line(metrics: StepMetrics, lr: float, seconds: float) -> dict[str, Any]:
    """What metrics.jsonl has of such a step, with the names that dashboards know: the tokens are those of solutions."""
    values = asdict(metrics)
    times = {"seconds": seconds, "training_tokens_per_second": metrics.tokens / seconds}
    return named({**{name: values[name] for name in MEASURED}, "lr": lr, **times}, {}, {})
