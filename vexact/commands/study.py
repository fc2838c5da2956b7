"""`vexact study`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from vexact.errors import BadInput
from vexact.experiments import Computing, Study, dry_run, export_study, load_study, run_study, seeds_of, verdicts
from vexact.experiments.reader import check_study

if TYPE_CHECKING:
    from vexact.cli import Study as Arguments

MOST_JOBS = 256


def run(args: Arguments, overrides: Sequence[str], isa: str) -> int:
    if not 1 <= args.jobs <= MOST_JOBS:
        raise BadInput(f"--jobs is {args.jobs}, must be 1 to {MOST_JOBS}")
    if args.dry_run and args.reuse:
        raise BadInput("--dry-run trains nothing and takes nothing: leave out --reuse")
    study = chosen(args, overrides)
    root = (args.output or Path("runs") / study.name).resolve()
    base = study.recipe()
    computing = Computing(base.device, base.profile, isa if base.device == "cpu" else "")
    console = Console()
    if args.dry_run:
        dry_run(study, root, computing=computing, jobs=args.jobs, console=console)
        return 0
    outcome = run_study(study, root, computing=computing, jobs=args.jobs, console=console, others=args.reuse)
    console.print(verdicts(outcome.results))
    console.print(f"{root}", soft_wrap=True, highlight=False)
    if args.export is not None:
        export_study(outcome.results, root, args.export)
        console.print(f"exported to {args.export}", soft_wrap=True, highlight=False)
    if outcome.failed:
        raise BadInput(f"{len(outcome.failed)} runs failed: {'; '.join(outcome.failed[:3])}")
    return 0


def chosen(args: Arguments, overrides: Sequence[str]) -> Study:
    """The study of the file under the flags. Raises BadInput."""
    study = load_study(args.file)
    if args.recipe is not None:
        study = replace(study, base=args.recipe)
    if args.seeds:
        seeds = args.seeds[0] if len(args.seeds) == 1 else list(args.seeds)
        study = replace(study, seeds=seeds_of(seeds, "--seeds"))
    flags = {"model.path": args.model, "device": args.device}
    given = {key: value for key, value in flags.items() if value is not None}
    study = study.with_common({**given, **_pairs(overrides)})
    check_study(study)
    return study


def _pairs(words: Sequence[str]) -> Mapping[str, Any]:
    """`--key value` or `--key=value`, values as YAML has them."""
    pairs: dict[str, Any] = {}
    rest = list(words)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not key.startswith("--") or len(key) < 3 or (not equals and not rest):
            raise BadInput(f"{key}: values of the recipe are written --key value")
        text = value if equals else rest.pop(0)
        try:
            pairs[key[2:]] = yaml.safe_load(text) if text else ""
        except yaml.YAMLError:
            raise BadInput(f"{key}: {text!r} is not a value") from None
    return pairs
