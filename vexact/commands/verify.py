"""`vexact verify`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vexact.commands.arguments import mismatch_override
from vexact.commands.model import DTYPES, check_writable
from vexact.errors import BadInput
from vexact.recipe import load_recipe
from vexact.verification.report import as_annotations, as_json, as_junit, line, table
from vexact.verification.result import Line
from vexact.verify import verify
from vexact_kernels import Kernels

if TYPE_CHECKING:
    from vexact.cli import Verify


def run(args: Verify, kernels: Kernels) -> int:
    console = Console()
    for flag, path in (("--json", args.json), ("--junitxml", args.junitxml)):
        if path is not None:
            check_writable(flag, path)
    section = load_recipe(None, dict(map(mismatch_override, args.mismatch))).mismatch
    if args.mutants and not section.off:
        raise BadInput("--mutants: they are broken variants of the exact engine; leave out --mismatch")
    with _Watch.on(console) as watch:
        dtypes = [DTYPES[name] for name in args.dtype]
        result = verify(
            args.model, kernels, dtypes, args.seconds, args.mutants, watch.begin, watch.done, mismatch=section
        )
    if console.is_terminal:
        console.print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(result), indent=1) + "\n", encoding="utf-8")
    if args.junitxml is not None:
        args.junitxml.write_text(as_junit(result), encoding="utf-8")
    if result.skipped:
        print(f"{result.skipped} checks did not run: give them more --seconds")
    if args.github:
        print("\n".join(as_annotations(result)))
    print(result.summary)
    return result.exit_code


class _Watch:
    """On a terminal one moving line says what runs, and a table follows; elsewhere each check prints its line."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task("loading", total=None)

    @staticmethod
    @contextmanager
    def on(console: Console) -> Iterator[_Watch]:
        if not console.is_terminal:
            yield _Watch(None)
            return
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            yield _Watch(progress)

    def begin(self, name: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=name)

    def done(self, finished: Line) -> None:
        if self._progress is None:
            print(line(finished), flush=True)
