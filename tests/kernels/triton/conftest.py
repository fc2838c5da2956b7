"""What `benchmarks/gpu_compile.py` compiles, and the mutants: made once, in processes that do not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import interpreter  # noqa: F401  (before any module imports a kernel)
from kernels.triton.ptx import Program

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Compiled:
    """A row of gpu_kernels.json, or a mutant, and its files."""

    row: dict[str, Any]
    folder: Path

    def __str__(self) -> str:
        kinds = ", ".join(f"{n}: {t}" for n, t in self.row["types"].items() if t.startswith("*"))
        return f"{self.row['kernel']} {self.row['target']} {self.row['origin']} ({kinds}; {self.row['constants']})"

    @cached_property
    def ir(self) -> str:
        return (self.folder / f"{self.row['file']}.ttir").read_text()

    @cached_property
    def program(self) -> Program:
        return Program((self.folder / f"{self.row['file']}.ptx").read_text())

    @property
    def portable(self) -> bool:
        return "portable" in self.row["profiles"]


@dataclass(frozen=True)
class Everything:
    """All that was compiled. `variants`: with machine code for NVIDIA; `forms`: with Triton's form alone."""

    ops: list[str]
    rows: list[Compiled]

    @cached_property
    def variants(self) -> list[Compiled]:
        return [c for c in self.rows if "registers" in c.row and c.row["target"] != "gfx942"]

    @cached_property
    def launched(self) -> list[Compiled]:
        return [c for c in self.variants if c.row["origin"] == "launched"]


def run(*command: str | Path) -> None:
    """A Python program that compiles: without the variable that makes Triton interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    folder = tmp_path_factory.mktemp("gpu_kernels")
    run(ROOT / "benchmarks" / "gpu_compile.py", "--quick", "--to", folder)
    result = json.loads((folder / "gpu_kernels.json").read_text())
    return Everything(result["environment"]["ops"], [Compiled(row, folder) for row in result["variants"]])


@pytest.fixture(scope="session")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """By name; those that are compiled for more than one size have a name each."""
    folder = tmp_path_factory.mktemp("mutants")
    run(Path(__file__).parent / "mutants.py", folder)
    return {row["name"]: Compiled(row, folder) for row in json.loads((folder / "mutants.json").read_text())}
