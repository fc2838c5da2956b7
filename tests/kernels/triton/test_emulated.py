"""The compiled instructions of the portable profile, run one by one on numpy, give the CPU's bits.

`emulated.py` runs them in a process that does not interpret Triton: every op on sm_90, products and rows on sm_80 and
sm_100. "order" lets factors carry their k and every fused multiply-add check that it is the next one: outputs are one
chain over all of k, ascending, of whatever the values are.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels.triton.conftest import run

TARGETS = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """By name: how many values of each result differ, or in what is called order are out of it."""
    file = tmp_path_factory.mktemp("emulated") / "differing.json"
    run(Path(__file__).parent / "emulated.py", file, *TARGETS)
    found: dict[str, list[int]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_the_instructions_give_the_bits_of_the_cpu(differing: dict[str, list[int]], target: str) -> None:
    here = {name: counts for name, counts in differing.items() if name.startswith(f"{target} ")}
    assert {name: counts for name, counts in here.items() if any(counts)} == {}
    assert {f"{target} products bfloat16 70", f"{target} order float32"} <= set(here)
    if target == "sm_90":
        assert {"sm_90 attention bfloat16", "sm_90 whole rows"} <= set(here)


def test_an_ascending_chain_is_in_order(differing: dict[str, list[int]]) -> None:
    assert differing["mutant ascending"] == [0]


@pytest.mark.parametrize("how", ["descending", "two sums", "fused rotation"])
def test_another_order_is_seen(differing: dict[str, list[int]], how: str) -> None:
    assert differing[f"mutant {how}"][0] > 0
