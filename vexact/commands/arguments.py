"""Arguments of the commands that compare log-probabilities. Importing them loads nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vexact.commands.computing import Computing, Dtype
from vexact.errors import BadInput


@dataclass(frozen=True)
class Compare:
    """Judge two columns of log-probabilities, of any engines: 0 within, 1 outside, 2 bad input, 3 inconclusive.

    A run's folder, or a file of JSON lines, parquet or torch's `.pt` as vexact, vLLM, SGLang, verl or TRL shape it.
    `FILE:COLUMN` names one of several columns, and where B holds a sampler's and a trainer's it must. Without a limit
    the bits must be equal.
    """

    sampler: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """What sampling recorded."""
    trainer: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """What was found for the same tokens."""
    max_abs: float | None = None
    """Largest |log p of B − log p of A| of a token that is within."""
    max_k3: float | None = None
    """Largest K3, in nats a token."""
    min_tokens: int = 1
    """Fewer compared tokens are inconclusive."""
    max_unscored: int = 0
    """More rollouts without log-probabilities on one side are inconclusive."""
    json: Path | None = None
    """Write the result as JSON to this file."""
    junitxml: Path | None = None
    """Write the result as JUnit's XML to this file."""
    github: bool = False
    """Print annotations for GitHub."""

    def run(self) -> int:
        from vexact.commands.compare import run

        return run(self)


@dataclass(frozen=True)
class Calibrate(Computing):
    """Describe a mismatch and print the `mismatch:` block of a recipe that reproduces its core.

    Of two columns in files, as `compare` takes them (without B the file or run itself must hold both). With --model the
    exact engine scores: the tokens of A, or, without A, tokens that are sampled here by the engine under a mismatch,
    whose achieved dose is printed beside the wanted one, or by transformers.
    """

    sampler: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="A")] = None
    """What sampling recorded."""
    trainer: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="B")] = None
    """What was found for the same tokens."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the block to this file."""
    json: bool = False
    """Print JSON."""
    model: str | None = None
    """Score with this model, a Hugging Face folder or `tiny`; without A also sample with it."""
    mismatch: tuple[str, ...] = ()
    """Sample under it, as preset=bf16-dense or cause=fp8-kv."""
    block: Path | None = None
    """Sample under the `mismatch:` section of this file; --mismatch goes over it."""
    against: Literal["transformers"] | None = None
    """Sample with transformers and the same weights instead, in padded batches over a cache."""
    against_dtype: Dtype | None = None
    """What transformers computes in, by default as the exact engine."""
    dtype: Dtype | None = None
    """What the exact engine computes in, by default the recipe's or the checkpoint's."""
    recipe: Path | None = None
    """Prompts, temperature and lengths of this recipe, and its `mismatch:` where no flag says otherwise."""
    prompts: Path | None = None
    """Prompts of this file: a text a line, or JSON lines with `prompt_ids` or `prompt`; `.gz` is unpacked."""
    tokens: int = 2000
    """Fewest tokens to sample and compare."""
    max_tokens: int | None = None
    """Most tokens of a completion, by default the recipe's, or 64."""
    temperature: float | None = None
    """To sample at, by default the recipe's, or 1. Of A: of its rollouts that record none."""
    seed: int | None = None
    """By default the recipe's, or 0."""
    dump: Path | None = None
    """Write the tokens with both log-probabilities to this file, a rollout a line."""

    def run(self) -> int:
        from vexact.commands.calibrate import run

        return run(self)


def mismatch_override(word: str) -> tuple[str, str]:
    """key=value, as an override of a recipe. Raises BadInput."""
    key, equals, value = word.partition("=")
    if not equals:
        raise BadInput(f"--mismatch {word}: is written key=value, as preset=bf16-dense")
    return f"mismatch.{key}", value
