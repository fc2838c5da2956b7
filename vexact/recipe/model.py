"""Which weights a run begins with."""

from __future__ import annotations

from dataclasses import dataclass

from vexact.recipe.values import choice


@dataclass(frozen=True)
class ModelSection:
    """Where the weights come from and the dtype they are computed in."""

    path: str = "tiny"  # a Hugging Face folder, or `tiny`, or `tiny-modsum` which reads modsum's signs only
    dtype: str = choice("checkpoint", "float32", "bfloat16", "float16")  # `checkpoint`: the one it names
