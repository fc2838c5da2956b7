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

if TYPE_CHECKING:
    from vexact_kernels import Kernels

BAD_INPUT = 2
ISA_VARIABLE = "VEXACT_ISA"
Dtype = Literal["float32", "bfloat16", "float16"]
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


Command = (
    Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[Generate, tyro.conf.subcommand("generate", prefix_name=False)]
    | Annotated[Score, tyro.conf.subcommand("score", prefix_name=False)]
    | Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[Fetch, tyro.conf.subcommand("fetch", prefix_name=False)]
    | Annotated[Info, tyro.conf.subcommand("info", prefix_name=False)]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. The console script calls it without arguments."""
    try:
        command, unknown = _parsed(sys.argv[1:] if argv is None else argv)
        if isinstance(command, Train):
            return command.run(unknown)
        if unknown:
            raise ValueError(f"unrecognized arguments: {' '.join(unknown)}")
        return command.run()
    except BrokenPipeError:  # whoever read the output has gone: nothing is left to be said, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"vexact: {' '.join(str(error).split())}", file=sys.stderr)
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
        raise ValueError(_unboxed(box.getvalue())) from None


def _unboxed(text: str) -> str:
    """What is said inside tyro's box above its rule, on one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    said = lines[: next((i for i, line in enumerate(lines) if line.startswith("───")), len(lines))]
    return " ".join(" ".join(said).split()) or "the command line cannot be read; see vexact --help"


def _kernels(threads: int) -> Kernels:
    """The instruction set that VEXACT_ISA names, or the best; `reference` is the slow specification."""
    import torch

    from vexact_kernels import load

    if threads < 0:
        raise ValueError(f"--threads is {threads}, must be at least 1, or 0 for torch's own choice")
    if threads:
        torch.set_num_threads(threads)
    isa = os.environ.get(ISA_VARIABLE) or None
    try:
        return load("reference") if isa == "reference" else load("cpu", isa)
    except ValueError as error:
        raise ValueError(f"{ISA_VARIABLE}: {error}" if isa else str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
