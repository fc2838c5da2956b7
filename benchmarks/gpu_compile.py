"""Compile every kernel that the engine starts on a GPU, for GPUs that are not there, and write what came out.

Needs no GPU. FOLDER gets the assembly (PTX; for gfx942 its own) and Triton's own form (TTIR) of each variant of each
kernel, gpu_kernels.json and the table gpu_kernels.md. What a launch needs is compiled for each target. For sm_90 there
are variants beside it: nothing known to be divisible by 16, one integer argument equal to 1 (which Triton makes a
constant), and all of them; of these the TTIR is written, and in bfloat16 the first is compiled too. gfx942, in
bfloat16, is there to show that it compiles: nothing is claimed of its bits. `tests/kernels/triton/test_compile.py`
reads what --quick makes: all launches for sm_90, and for the other targets every kernel of each profile in bfloat16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Line tables are half of the text and change no instruction. Triton reads this when it is imported.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

import torch
import triton

from gpu_tour import FLOAT32, NOTHING_STARTED, STORED, Use, tour
from vexact_kernels.contract import PROFILES
from vexact_kernels.triton import Triton
from vexact_kernels.triton.ahead import CAPABILITY, TARGETS, Collector, Variant, compiled, triton_ir

FULL = "sm_90"  # the target that gets every specialisation
RARE = ("head 80", "head 256")  # with --quick for sm_90 alone


@dataclass(frozen=True)
class Job:
    """One variant for one target."""

    variant: Variant
    target: str
    profiles: tuple[str, ...]
    uses: tuple[Use, ...]
    ir_only: bool  # Triton's form alone
    of: Variant  # the launched one that it was made of, or itself

    @property
    def stem(self) -> str:
        """The kernel's file without its ending."""
        return self.variant.module.rsplit(".", 1)[-1]

    def file(self, variant: Variant) -> str:
        """The name of the files that are written of a variant, without their ending."""
        text = repr((variant.types, variant.constants, sorted(variant.divisible), variant.options))
        return f"{variant.name}.{hashlib.sha256(text.encode()).hexdigest()[:10]}.{self.target}"


def launched(target: str, ops: Sequence[str]) -> dict[Variant, dict[str, list[Use]]]:
    """Each variant that the engine starts on a target, by profile the calls that it is started for."""
    found: dict[Variant, dict[str, list[Use]]] = {}
    for profile in PROFILES:
        collector = Collector(target)
        kernels = Triton(profile, torch.device("cpu"), launch=collector, capability=CAPABILITY[target])
        tour(kernels, ops, partial(setattr, collector, "use"))
        for variant, uses in collector.found.items():
            found.setdefault(variant, {})[profile] = uses
    return found


def jobs_of(target: str, ops: Sequence[str], quick: bool) -> list[Job]:
    """What is compiled for a target, each variant once."""
    jobs: dict[tuple[Variant, bool], Job] = {}
    names: set[str] = set()
    for variant, by_profile in launched(target, ops).items():
        profiles, uses = tuple(by_profile), tuple(use for uses in by_profile.values() for use in uses)
        if target == "gfx942" and not ("portable" in profiles and stands_for_all(uses)):
            continue
        if quick and target != FULL:
            uses = tuple(use for use in uses if stands_for_all([use]) and use.shape not in RARE)
            if not uses or (target == "gfx942" and variant.name in names):
                continue
        names.add(variant.name)
        jobs[variant, False] = Job(variant, target, profiles, uses, False, variant)
        if target != FULL or (quick and not stands_for_all(uses)):
            continue
        for other in (variant.undivided(), *variant.ones()):
            compiles = other.origin == "undivided" and not quick and stands_for_all(uses)
            jobs.setdefault((other, not compiles), Job(other, target, profiles, (), not compiles, variant))
    return list(jobs.values())


def stands_for_all(uses: Sequence[Use]) -> bool:
    """Whether a variant is one of the storage type that is compiled where not every one is."""
    return any(use.dtype == "bfloat16" or use.op in FLOAT32 for use in uses)


def work(folder: Path, job: Job) -> dict[str, Any]:
    """Compile and write the files; the row of the table, with an error where that fails."""
    begin, variant = time.perf_counter(), job.variant
    row: dict[str, Any] = {
        "kernel": variant.name,
        "stem": job.stem,
        "target": job.target,
        "origin": variant.origin,
        "profiles": job.profiles,
        "types": dict(variant.types),
        "constants": {name: plain(value) for name, value in variant.constants},
        "divisible": sorted(variant.divisible),
        "options": dict(variant.options),
        "uses": [asdict(use) for use in job.uses],
        "file": job.file(variant),
        "of": job.file(job.of),
    }
    try:
        return row | written(folder, job, row["file"], begin)
    except Exception as error:  # the others are compiled all the same; main tells
        return row | {"error": f"{type(error).__name__}: {str(error)[-1000:]}"}


def written(folder: Path, job: Job, file: str, begin: float) -> dict[str, Any]:
    """Compile and write the files; what the compiler says."""
    if job.ir_only:
        (folder / f"{file}.ttir").write_text(triton_ir(job.variant, job.target))
        return {}
    built = compiled(job.variant, job.target)
    (folder / f"{file}.ttir").write_text(built.ir)
    (folder / f"{file}.ptx").write_text(built.assembly)
    seconds = round(time.perf_counter() - begin, 3)
    return {"registers": built.registers, "local": built.local, "shared": built.shared, "seconds": seconds}


def plain(value: Any) -> Any:
    """A constant as JSON has it."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def say(done: int, jobs: int, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{done}/{jobs} {row['kernel']} {row['target']} {row['origin']} does not compile", flush=True)
    elif "registers" in row:
        print(
            f"{done}/{jobs} {row['kernel']} {row['target']} {row['origin']}: {row['registers']} registers, "
            f"{row['local']} B local, {row['shared']} B shared, {row['seconds']} s",
            flush=True,
        )


def compile_all(
    folder: Path, jobs: list[Job], processes: int, tell: Callable[[int, int, dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """The rows, in the order of the jobs."""
    rows = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for row in pool.imap(partial(work, folder), jobs, chunksize=1):
            rows.append(row)
            tell(len(rows), len(jobs), row)
    return rows


def table(rows: Iterable[dict[str, Any]], targets: Sequence[str]) -> str:
    """Markdown: per kernel the largest of its compiled variants, by target."""
    text = [
        "# Kernels, compiled ahead of time",
        "",
        "Registers of a thread, bytes of local memory (0: nothing is spilled), bytes of shared memory: the largest",
        "over the variants of a kernel that are launched. gfx942 is only known to compile (there: vector registers).",
        "",
        "| stem | kernel | " + " | ".join(f"{t}: variants, registers, local, shared" for t in targets) + " |",
        "|---" * (2 + len(targets)) + "|",
    ]
    by_kernel: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if "registers" in row and row["origin"] == "launched":
            by_kernel.setdefault((row["stem"], row["kernel"]), {}).setdefault(row["target"], []).append(row)
    for (stem, kernel), by_target in sorted(by_kernel.items()):
        cells = []
        for target in targets:
            some = by_target.get(target, [])
            most = [max(r[key] for r in some) for key in ("registers", "local", "shared")] if some else []
            cells.append(", ".join(map(str, [len(some), *most])) if some else "–")
        text.append(f"| {stem} | {kernel} | " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def result(rows: list[dict[str, Any]], targets: Sequence[str], seconds: float) -> str:
    """JSON with a line a variant."""
    head = {
        "triton": triton.__version__,
        "python": platform.python_version(),
        "targets": list(targets),
        "ops": [*STORED, *FLOAT32, *NOTHING_STARTED],
        "seconds": round(seconds, 1),
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return f'{{\n "environment": {json.dumps(head)},\n "variants": [\n  {lines}\n ]\n}}\n'


def short(row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a compiled variant: which one it is, and what it needs."""
    pointers = [kind[1:] for kind in row["types"].values() if kind.startswith("*")]
    kept = ("kernel", "target", "origin", "profiles", "constants", "options", "registers", "local", "shared")
    return {"dtypes": list(dict.fromkeys(pointers)), **{name: row[name] for name in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/gpu_kernels"), metavar="FOLDER")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--only", metavar="STEM", help="kernels of this file alone, as in matmul")
    parser.add_argument("--quick", action="store_true", help="what the tests read: fewer variants")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="for the table again, and a short JSON")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    begin = time.perf_counter()
    jobs = [job for target in options.targets for job in jobs_of(target, [*STORED, *FLOAT32], options.quick)]
    jobs = [job for job in jobs if options.only in (None, job.stem)]
    if not jobs:
        sys.exit(f"no kernel is in a file {options.only}")
    options.to.mkdir(parents=True, exist_ok=True)
    rows = compile_all(options.to, jobs, options.processes, say)
    seconds = time.perf_counter() - begin
    (options.to / "gpu_kernels.json").write_text(result(rows, options.targets, seconds))
    (options.to / "gpu_kernels.md").write_text(table(rows, options.targets))
    if options.results:
        compiled_rows = [short(row) for row in rows if "registers" in row]
        (options.results / "gpu_kernels.json").write_text(result(compiled_rows, options.targets, seconds))
        (options.results / "gpu_kernels.md").write_text(table(rows, options.targets))
    print(table(rows, options.targets))
    built = sum("registers" in row for row in rows)
    print(f"{built} compilations and {len(rows) - built} intermediate forms in {seconds:.0f} s, in {options.to}")
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print(f"{row['kernel']} {row['target']} {row['origin']} {row['types']}: {row['error']}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
