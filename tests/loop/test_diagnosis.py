"""What mismatch does to the gradient of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runs import lines_of, run, small_recipe
from vexact.loop.diagnosis import cosine, norm, projection
from vexact.recipe import CheckpointSection, LossSection, MismatchSection, OptimizerSection, RunSection, SyncSection

EVERY = 3


def lines(tmp_path: Path, **mismatch: Any) -> list[dict[str, Any]]:
    folder = tmp_path / "run"
    recipe = small_recipe(
        folder,
        tmp_path / "odd.py",
        loss=LossSection(name="reinforce"),
        optimizer=OptimizerSection(lr=1e-3),
        sync=SyncSection(),
        delay=0,
        checkpoint=CheckpointSection(),
        mismatch=MismatchSection(**mismatch),
        run=RunSection(folder=str(folder), diagnose=EVERY),
    )
    run(recipe)
    found = lines_of(folder)
    steps = [line for line in found if line["step"] >= 0]
    assert ["drift_norm" in line for line in steps] == [step % EVERY == 0 for step in range(len(steps))]
    return steps[::EVERY]


def test_an_exact_sampler_makes_no_drift(tmp_path: Path) -> None:
    """Not small but 0: where q is p, the centred gradient is the plain one in every bit."""
    for line in lines(tmp_path):
        assert line["drift_norm"] == 0.0
        assert (line["gradient_cosine"], line["gradient_bias"]) == (1.0, 0.0)
        assert "noise_projection" not in line


def test_a_disturbed_sampler_makes_drift_and_leaves_the_gradient_exact(tmp_path: Path) -> None:
    for line in lines(tmp_path, site="weights", sigma=0.2):
        assert line["drift_norm"] > 0
        assert (line["gradient_cosine"], line["gradient_bias"]) == (1.0, 0.0)
        assert "noise_projection" in line


def test_a_disturbed_trainer_bends_the_gradient(tmp_path: Path) -> None:
    for line in lines(tmp_path, site="hidden", sigma=0.3, side="trainer"):
        assert 0 < line["gradient_cosine"] < 1
        assert line["gradient_bias"] > 0


def test_the_plain_gradient_is_the_one_that_a_plain_step_takes(tmp_path: Path) -> None:
    for line in lines(tmp_path, site="weights", sigma=0.2):
        assert line["reinforce_norm"] == pytest.approx(line["grad_norm"], rel=1e-2)  # bfloat16 rounds other divisors


def test_projections_and_cosines_are_those_of_vectors() -> None:
    a, b = ({"x": torch.tensor(x), "y": torch.tensor(y)} for x, y in (([3.0, 0.0], [4.0]), ([0.0, 2.0], [0.0])))
    zero = {name: torch.zeros_like(value) for name, value in a.items()}
    assert norm(a) == 5.0
    assert cosine(a, b) == 0.0
    assert cosine(a, a) == pytest.approx(1.0)
    assert cosine(a, zero) == 0.0
    assert projection(zero, a, b) == 0.0
    assert projection(zero, a, {"x": torch.tensor([1.0, 0.0]), "y": torch.zeros(1)}) == 3.0
