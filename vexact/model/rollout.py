"""The finished sequence that sampling hands to training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vexact.model.law import Law
from vexact.model.policy import Scored

Finish = Literal["stop", "length", "nonfinite"]


@dataclass(frozen=True)
class Rollout:
    """A finished sequence. `completion` and `logprobs` always have equal length.

    request, sample: the address of its draws; the pair is its id and orders the rollouts of a step. logprobs: float32
    [len(completion)] on the host, natural log, of the distribution that was sampled (after temperature; temperature 0
    is greedy and records the log-probability at temperature 1). finish: `stop` (the last token is a stop id), `length`,
    or `nonfinite` (the model gave a logit that is not finite where the next token would have been; never trained on).
    version and digest: the weights and the arithmetic that sampled it. law: what the tokens were drawn from, on the
    host, a row a token of the completion; None unless a caller wanted it kept.
    """

    request: int
    sample: int
    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Tensor
    finish: Finish
    temperature: float
    version: int
    digest: str
    cached_tokens: int = 0  # prompt tokens whose keys and values were already in pages
    law: Law | None = None

    @property
    def id(self) -> tuple[int, int]:
        return self.request, self.sample

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.prompt, *self.completion]

    @property
    def scored(self) -> Scored:
        """The completion, to be scored again by any policy."""
        return Scored(self.tokens, len(self.prompt), self.temperature, self.request, self.sample)
