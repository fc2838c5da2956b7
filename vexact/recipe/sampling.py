"""What a step samples."""

from __future__ import annotations

from dataclasses import dataclass

from vexact.recipe.values import number


@dataclass(frozen=True)
class SamplingSection:
    """What a step samples. The last four change the speed and no bit."""

    prompts: int = number(8, at_least=1)  # of a step; with `objective: sft` the solutions that it learns from
    samples: int = number(4, at_least=1)  # of a prompt: the group
    temperature: float = number(1.0, above=0.0)
    max_tokens: int = number(8, at_least=1)  # of a completion
    rounds: int = number(1, at_least=1)  # from 2 on, groups without spread give way to others, as often (DAPO)
    seed: int = number(0, at_least=0, below=2.0**63)  # beside the recipe's own: other draws of the same questions
    tokens_per_step: int = number(512, at_least=1)
    chunk: int = number(256, at_least=1)
    running: int = number(64, at_least=1)
    pages: int = number(0, at_least=0)  # of 64 positions, for keys and values; 0: up to 2 GiB of them
