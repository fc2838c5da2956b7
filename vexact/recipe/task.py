"""What is asked, and who scores the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vexact.recipe.values import OPEN, choice, number


@dataclass(frozen=True)
class RewardSection:
    """Who scores completions, and what becomes of a score that fails: vexact/tasks/scoring.py has the rule."""

    function: str = ""  # `module:function`, `file.py:function` or `math_verify`; empty: the task's own scorer
    signature: str = choice("auto", "trl", "verl")  # auto: seen from the names of the function's parameters
    options: dict[str, Any] = field(default_factory=dict, metadata=OPEN)  # the function's further arguments
    seconds: float = number(10.0, above=0.0)  # of a call: one completion, under trl all of a step
    on_error: float = number(0.0)  # the reward where a call raises, is too slow or gives no finite number
    fatal: bool = False  # end the run instead
    success_at: float = number(1.0)  # a completion succeeds where its unflipped reward is at least this
    flip: float = number(0.0, at_least=0.0, below=1.0)  # probability that a reward r of 0 or 1 becomes 1 - r


@dataclass(frozen=True)
class TaskSection:
    """What is asked and how it is scored."""

    name: str = "chain_sum"  # chain_sum, modsum, file, or the name of a reasoning-gym task
    options: dict[str, Any] = field(default_factory=dict, metadata=OPEN)  # of that task: vexact/tasks, or the library's
    held_out: float = number(0.0, at_least=0.0, below=1.0)  # share of the questions that are kept for evaluation
    stop: str = ""  # a completion also ends with the first token whose text holds this
    chat: bool = False  # text prompts become a user's message
    system: str = ""  # message in front of every chat
    chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata=OPEN
    )  # variables of the tokenizer's template, as enable_thinking
    reward: RewardSection = field(default_factory=RewardSection)
