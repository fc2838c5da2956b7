"""How held-out success is measured, and the supervised start that may end by it."""

from __future__ import annotations

from dataclasses import dataclass

from vexact.recipe.values import RecipeError, number


@dataclass(frozen=True)
class EvalSection:
    """Success on held-out questions: `n` completions each, before the first step, every so many steps, at the end."""

    items: int = number(0, at_least=0)  # held-out questions, always the first ones; 0: no evaluation
    every: int = number(0, at_least=0)  # steps between evaluations; 0: at the beginning and the end only
    n: int = number(1, at_least=1)  # completions of a question
    temperature: float = number(1.0, at_least=0.0)  # 0 takes the most likely token
    max_tokens: int = number(0, at_least=0)  # of a completion; 0: as sampling.max_tokens
    best: bool = True  # keep the weights with the greatest success in the run's folder `best`


@dataclass(frozen=True)
class WarmStartSection:
    """Supervised steps on the task's own solutions before the first step of reinforcement, with an optimizer of their
    own. With `objective: sft` a recipe's steps are all of that kind instead. Raises RecipeError.
    """

    steps: int = number(0, at_least=0)  # at most; 0: none
    until: float = number(0.0, at_least=0.0)  # stop when held-out success is at least this; 0: after all steps
    every: int = number(10, at_least=1)  # steps between looks at it: the `eval` section says how
    sequences: int = number(64, at_least=1)  # of a step
    lr: float = number(1e-3, above=0.0)

    def __post_init__(self) -> None:
        if self.until > 1.0:
            raise RecipeError(f"warm_start.until = {self.until} is a share of completions, must be at most 1")
