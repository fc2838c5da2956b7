"""The proof on a GPU, in one script that needs nothing but the checkout: exactness, a CPU's bits, speed.

    python benchmarks/gpu_check.py                 on a machine with a GPU, within eight minutes
    python benchmarks/gpu_check.py --interpret     the same at toy size on a CPU, to know that the script works

1. `verify` in both profiles, forward and gradients, on random checkpoints of known shapes.
2. The portable profile against what a CPU recorded (benchmarks/results/gpu_golden.json): sampled ids, log-probabilities
   and gradients, bit for bit.
3. Kernels beside cuBLAS, SDPA and a plain copy; decoding, prefilling and training in tokens a second.

Prints one table last and writes benchmarks/results/gpu_<name of the GPU>.json. Exit code 1 if any bit differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gpu_golden
import gpu_speed
from gpu_golden import RECORDED, policy_of
from timing import environment
from vexact.model.checkpoint import save_folder
from vexact.model.config import DTYPES
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.verification.result import EQUAL, INCONCLUSIVE
from vexact.verification.subject import Sizes
from vexact.verify import verify
from vexact_kernels import PROFILES, Kernels, load

RESULTS = Path(__file__).parent / "results"
GOLDEN = "a CPU's bits"
TOY = Sizes(requests=4, samples=1, tokens=2, few=4, sequences=1, length=12, trained=2, trained_tokens=2)
MINUTES = 8.0
Row = dict[str, Any]


def interpreted(profile: str) -> Kernels:
    """The kernels under Triton's interpreter, repaired as in the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import interpreter  # noqa: F401  before anything of Triton's
    from vexact_kernels.triton import Triton

    return Triton(profile, torch.device("cpu"))


class Script:
    """One run of it: which kernels, how large, until when, and what was found."""

    def __init__(self, interpret: bool, minutes: float) -> None:
        self.interpret = interpret
        self.ends = time.monotonic() + 60 * minutes
        self.rows: list[Row] = []
        self.kernels: Callable[[str], Kernels] = (
            interpreted if interpret else lambda profile: load("cuda", profile=profile)
        )

    def say(self, text: str) -> None:
        left = max(0.0, self.ends - time.monotonic())
        print(f"[{left:4.0f} s left] {text}", flush=True)

    def found(self, part: str, what: str, profile: str, result: str, **figures: float | int | str | bool) -> None:
        """One row of the table."""
        self.rows.append({"part": part, "what": what, "profile": profile, "result": result, **figures})
        self.say(f"{part}: {what}, {profile}: {result}")

    def attempt(self, part: str, what: str, profile: str, run: Callable[..., None], *arguments: Any) -> None:
        """Run a piece; an error becomes a row, so that one broken piece does not cost a whole loan of a GPU."""
        if time.monotonic() > self.ends:
            self.found(part, what, profile, "not run: no time left", failed=True)
            return
        try:
            run(what, profile, *arguments)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.found(part, what, profile, f"{type(error).__name__}: {first[:150]}", failed=True)

    def golden(self) -> None:
        """The portable profile against what a CPU recorded."""
        recorded = json.loads(gpu_golden.RESULTS.read_text(encoding="utf-8"))
        for shape, dtypes in {"tiny": ("bfloat16",)}.items() if self.interpret else RECORDED.items():
            for dtype in dtypes:
                expected = recorded[shape][dtype]
                self.attempt(GOLDEN, f"{shape} {dtype}", "portable", self._compare, shape, dtype, expected)

    def _compare(self, what: str, profile: str, shape: str, dtype: str, expected: dict[str, Any]) -> None:
        actual = gpu_golden.record(policy_of(shape, self.kernels(profile), DTYPES[dtype]))
        parts = [key for key in expected if actual[key] != expected[key]]
        names = [name for name, value in expected["gradients"].items() if actual["gradients"].get(name) != value]
        compared = sum(map(len, expected["sampled_bits"])) + len(expected["scored_bits"])
        detail = f"{', '.join(parts)} ({len(names)} gradients)"
        result = f"differs: {detail}" if parts else f"equal: {compared} log-probabilities, all gradients"
        self.found(GOLDEN, what, profile, result, failed=bool(parts))

    def verify(self) -> None:
        """The theorem on random checkpoints, in both profiles."""
        shapes = {"tiny": 20.0} if self.interpret else {"tiny": 20.0, "smollm2-135m": 40.0, "qwen3-0.6b": 60.0}
        for shape, seconds in shapes.items():
            with tempfile.TemporaryDirectory() as folder:
                family, changes = gpu_golden.SHAPES[shape]
                config = tiny_config(family, dtype="bfloat16", **changes)
                save_folder(Path(folder) / shape, config, tiny_weights(config))
                for profile in PROFILES:
                    self.attempt("verify", f"{shape} bfloat16", profile, self._verify, Path(folder) / shape, seconds)

    def _verify(self, what: str, profile: str, folder: Path, seconds: float) -> None:
        seconds = min(seconds, max(10.0, self.ends - time.monotonic()))
        result = verify(folder, self.kernels(profile), seconds=seconds, sizes=TOY if self.interpret else None)
        differing = [check.name for check in result.checks if check.found.differ]
        values = sum(check.found.compared for check in result.checks)
        summary = result.summary + (f" ({', '.join(differing[:4])})" if differing else "")
        enough = (EQUAL, INCONCLUSIVE) if self.interpret else (EQUAL,)
        self.found("verify", what, profile, summary, values=values, failed=result.exit_code not in enough)

    def speed(self) -> None:
        """Kernels and the engine, beside what else one would use."""
        for profile in PROFILES:
            for name, piece in gpu_speed.pieces(self.kernels(profile), toy=self.interpret).items():
                self.attempt("speed", name, profile, self._timed, piece)

    def _timed(self, what: str, profile: str, piece: Callable[[], gpu_speed.Figures]) -> None:
        figures = piece()
        self.found("speed", what, profile, ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), **figures)

    def finish(self, to: Path | None) -> int:
        """Table, JSON, exit code."""
        table = Table(title=f"vexact on {device_name(self.interpret)}")
        for column in ("part", "what", "profile", "result"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(row["part"], row["what"], row["profile"], row["result"])
        Console(width=160).print(table)
        where = to or RESULTS / f"gpu_{device_name(self.interpret).lower().replace(' ', '_')}.json"
        about = {"device": device_name(self.interpret), **environment()}
        where.write_text(json.dumps({"environment": about, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        failed = [row for row in self.rows if row.get("failed")]
        print(f"{len(failed)} of {len(self.rows)} rows failed; written to {where}")
        return 1 if failed else 0


def device_name(interpret: bool) -> str:
    return "interpreter" if interpret else torch.cuda.get_device_name()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="toy size, on a CPU, under Triton's interpreter")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all of it")
    parser.add_argument("--only", choices=("golden", "verify", "speed"), help="one part")
    parser.add_argument("--to", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    if not args.interpret and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here; --interpret runs the script at toy size on a CPU", file=sys.stderr)
        return 2
    script = Script(args.interpret, args.minutes)
    for part in ("golden", "verify", "speed"):
        if args.only in (None, part):
            getattr(script, part)()
    return script.finish(args.to)


if __name__ == "__main__":
    sys.exit(main())
