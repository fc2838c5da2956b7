"""On a GPU: the parts of `benchmarks/gpu_check.py` as tests. Elsewhere: that the script works, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vexact_kernels import load

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


def reason() -> str:
    """Why no GPU can be had here, or empty."""
    try:
        load("cuda")
    except ValueError as error:
        # the tests interpret kernels, the script's own process does not
        return "" if "TRITON_INTERPRET" in str(error) else str(error)
    return ""


def check(*arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, rows and words of the script, run by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    to = Path(str(arguments[-1]))
    done = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    rows = json.loads(to.read_text())["rows"] if to.exists() else []
    return done.returncode, rows, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(bool(reason()), reason=reason())
@pytest.mark.parametrize("part", ["golden", "verify", "speed"])
def test_on_a_gpu(part: str, tmp_path: Path) -> None:
    code, rows, words = check("--only", part, "--to", tmp_path / "rows.json")
    assert code == 0 and rows, words


def test_the_script_compares_with_a_cpu_bit_by_bit(tmp_path: Path) -> None:
    code, rows, words = check("--interpret", "--only", "golden", "--to", tmp_path / "rows.json")
    assert code == 0, words
    assert [row["failed"] for row in rows] == [False] and "equal: " in rows[0]["result"]


def test_the_script_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, rows, words = check("--to", tmp_path / "rows.json")
    assert code == 2 and not rows and "no GPU" in words


def test_the_script_notices_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_check
    import gpu_golden

    recorded = json.loads(gpu_golden.RESULTS.read_text(encoding="utf-8"))["tiny"]["bfloat16"]
    changed = {**recorded, "scored_bits": [recorded["scored_bits"][0] ^ 1, *recorded["scored_bits"][1:]]}
    script = gpu_check.Script(interpret=True, minutes=5)
    script.kernels = lambda profile: load("cpu")
    for expected in (recorded, changed):
        script._compare("tiny", "portable", "tiny", "bfloat16", expected)
    assert [row["failed"] for row in script.rows] == [False, True]
    assert "differs: scored_bits" in script.rows[1]["result"]
    assert script.finish(tmp_path / "rows.json") == 1
