"""How weights move."""

from __future__ import annotations

from dataclasses import dataclass

from vexact.recipe.values import choice, number


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW on float32 masters. Weight decay moves matrices only, not norms and biases."""

    lr: float = number(1e-6, above=0.0)
    schedule: str = choice("constant", "linear", "cosine")  # vexact/training/schedule.py, over the recipe's steps
    warmup: int = number(0, at_least=0)  # steps in which lr rises from next to nothing
    final: float = number(0.0, at_least=0.0)  # share of lr that linear and cosine go down to
    beta1: float = number(0.9, at_least=0.0, below=1.0)
    beta2: float = number(0.999, at_least=0.0, below=1.0)
    eps: float = number(1e-8, above=0.0)
    weight_decay: float = number(0.0, at_least=0.0)
    max_grad_norm: float = number(1.0, above=0.0)
    tokens_at_once: int = number(1024, at_least=1)  # of a micro-batch; changes memory and speed, no bit
    recompute: bool = False  # layers run again on the way back instead of being kept; the same, no bit
