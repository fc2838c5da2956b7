"""What a caller asks of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vexact.errors import BadInput
from vexact.model.draws import is_temperature


@dataclass(frozen=True)
class Request:
    """Sample `n` completions of one prompt.

    id: 64 bits; with seed, sample index and position it addresses every draw, so no two requests of a run share one.
    temperature: 0 is greedy (ties go to the lowest id). max_tokens: of a completion; stop_ids: a completion ends with
    the first of them. Raises BadInput naming the field.
    """

    id: int
    prompt: Sequence[int]
    n: int = 1
    temperature: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadInput(f"request {self.id}: prompt is empty")
        if self.n < 1:
            raise BadInput(f"request {self.id}: n is {self.n}, must be at least 1")
        if not is_temperature(self.temperature):
            raise BadInput(
                f"request {self.id}: temperature is {self.temperature}, must be 0 or a normal float32 number"
            )
        if self.max_tokens < 0:
            raise BadInput(f"request {self.id}: max_tokens is {self.max_tokens}, must not be negative")
        for name, value in (("id", self.id), ("seed", self.seed)):
            if not 0 <= value < 1 << 64:
                raise BadInput(f"request {self.id}: {name} is {value}, must fit 64 bits unsigned")
