"""What measures needs no engine: it is imported and used where the compiled library cannot be loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = """
import ctypes, sys
class Refusing(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if "vexact" in str(name):
            raise OSError("no library here")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = Refusing
"""
USE = """
import vexact.study
from vexact.study import comparison, distribution, dumps, fit, metrics, odds, processor
from vexact import cli
sys.exit(cli.main(["compare", sys.argv[1], sys.argv[1] + ":hf_bf16", "--max-k3", "1"]))
"""
ENGINE = "import vexact_kernels; vexact_kernels.load('cpu')"


def run(source: str) -> subprocess.CompletedProcess[str]:
    sample = str(ROOT / "tests" / "data" / "vllm_cpu_bf16_smollm2_sample.jsonl.gz")
    return subprocess.run([sys.executable, "-c", source, sample], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_measuring_works_without_the_compiled_library() -> None:
    done = run(BLOCK + USE)
    assert done.returncode == 0, done.stderr
    assert "compare: within, 3,840 tokens" in done.stdout


def test_the_block_would_stop_the_engine() -> None:
    assert "no library here" in run(BLOCK + ENGINE).stderr


def test_the_package_imports_nothing_by_itself() -> None:
    done = run(
        "import sys, vexact.study; print([m for m in sys.modules if m.startswith(('torch', 'numpy', 'transf'))])"
    )
    if done.returncode:
        pytest.fail(done.stderr)
    assert done.stdout.strip() == "[]"
