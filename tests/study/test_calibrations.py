"""The calibrations that ship: each is a recipe's section, says where it is from, and its dose can be had."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vexact import cli
from vexact.loop.resume import load_run
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.recipe import MismatchSection, RecipeError, load_recipe
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.dose import Frozen
from vexact.study.mismatch import Mismatch
from vexact_kernels import load

ROOT = Path(__file__).parents[2]
BLOCKS = sorted((ROOT / "calibrations").glob("*.yaml"))
NAMES = ["smollm2_transformers_bf16", "smollm2_transformers_fp32", "smollm2_vllm_bf16"]
RECIPE = ROOT / "recipes" / "tiny_chain_sum.yaml"


def rows() -> dict[str, Any]:
    found = json.loads((ROOT / "benchmarks" / "results" / "calibrations.json").read_text())
    return {f"smollm2_{row['name']}": row for row in found["rows"]}


def test_all_of_them_are_there() -> None:
    assert [path.stem for path in BLOCKS] == NAMES == sorted(rows())


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_a_block_is_the_section_that_its_measurement_gave(path: Path) -> None:
    text, row = path.read_text(), rows()[path.stem]
    content = yaml.safe_load(text)
    assert content == {"mismatch": row["fit"]["mismatch"]}
    section = load_recipe(RECIPE, also=[path]).mismatch
    assert section == MismatchSection(**content["mismatch"])
    assert section.target == pytest.approx(row["distribution"]["measures"]["k3"], rel=1e-3)
    tokens = row["distribution"]["measures"]["tokens"]
    assert tokens >= 1500
    for words in (f"{tokens:,} tokens", "K3", "p99", "Fitted", "Not fitted", "benchmarks/calibrate_smollm2.py"):
        assert words in text
    assert not re.search(r"20\d\d-\d\d", text)


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_its_dose_is_solved_within_a_tenth(path: Path) -> None:
    policy, section = Policy.load("tiny", load("cpu"), torch.float32), load_recipe(RECIPE, also=[path]).mismatch

    def sampled(who: Policy, first: int, count: int) -> list[Rollout]:
        requests = [Request(first + i, [first % 200 + i, 3, 7 + i], 1, 1.0, 1, 48) for i in range(count)]
        return Sampler(who).run(requests)

    mismatch = Mismatch(section, 0)
    dose = mismatch.begin(policy, lambda: sampled(policy, 0, 64), 4096)
    assert dose is not None and dose.divergence == pytest.approx(section.target, rel=0.1)
    noisy = mismatch.sampler(policy, 0)
    frozen = Frozen(policy, [rollout.scored for rollout in sampled(noisy, 1000, 64)], 4096)
    assert frozen.divergence(noisy) == pytest.approx(section.target, rel=0.1)  # on others than it was solved on
    mismatch.sigma = 1.2 * dose.sigma
    assert frozen.divergence(mismatch.sampler(policy, 0)) > 1.1 * section.target  # the mutant


def test_a_block_is_laid_over_a_recipe_and_under_the_command_line(tmp_path: Path) -> None:
    base, block = load_recipe(RECIPE), BLOCKS[0]
    laid = load_run(RECIPE, ["--mismatch.seed", "3"], [block])
    assert laid.mismatch.seed == 3 and laid.mismatch.k3 > 0.0
    assert {name for name in vars(base) if getattr(base, name) != getattr(laid, name)} == {"mismatch"}
    (tmp_path / "other.yaml").write_text("mismatch: {k3: 0.5}\nsteps: 2\n")
    last = load_recipe(RECIPE, also=[block, tmp_path / "other.yaml"])
    assert (last.mismatch.k3, last.mismatch.site, last.steps) == (0.5, "logits", 2)
    (tmp_path / "wrong.yaml").write_text("mismatch: {sighma: 0.5}\n")
    with pytest.raises(RecipeError, match=r"wrong\.yaml: unknown key mismatch\.sighma; did you mean mismatch\.sigma"):
        load_recipe(RECIPE, also=[tmp_path / "wrong.yaml"])


def test_a_run_takes_a_block_from_the_command_line(tmp_path: Path) -> None:
    words = ["train", str(RECIPE), "--also", str(BLOCKS[0]), "--steps", "1", "--run.folder", str(tmp_path / "run")]
    assert cli.main(words) == 0
    assert load_recipe(tmp_path / "run" / "config.yaml").mismatch == load_recipe(None, also=BLOCKS[:1]).mismatch
