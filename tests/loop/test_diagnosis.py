"""What mismatch does to the gradient of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from made import make_rollouts
from runs import lines_of, run, small_recipe
from vexact.loop.diagnosis import Batch, cosine, gradient, norm, projection
from vexact.model.policy import Policy
from vexact.recipe import CheckpointSection, LossSection, MismatchSection, OptimizerSection, RunSection, SyncSection
from vexact_kernels import load

EVERY = 3


def lines(tmp_path: Path, batch: int = 0, **mismatch: Any) -> list[dict[str, Any]]:
    tmp_path.mkdir(exist_ok=True)
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
        run=RunSection(folder=str(folder), diagnose=EVERY, diagnose_batch=batch),
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


def test_noise_on_gradients_bends_them_and_is_seen(tmp_path: Path) -> None:
    """Noise of σ times a stack's root mean square on each of its numbers: |g − exact| is σ·|exact| and the cosine
    1/√(1 + σ²), both up to 1/√n of the drawn numbers, of which the model has more than ten thousand."""
    for line in lines(tmp_path, site="gradients", sigma=0.5, side="trainer"):
        assert line["gradient_bias"] == pytest.approx(0.5, abs=0.01)
        assert line["gradient_cosine"] == pytest.approx((1 + 0.5**2) ** -0.5, abs=0.01)
        assert line["drift_norm"] == 0.0


def test_the_plain_gradient_is_the_one_that_a_plain_step_takes(tmp_path: Path) -> None:
    for line in lines(tmp_path, site="weights", sigma=0.2):
        assert line["reinforce_norm"] == pytest.approx(line["grad_norm"], rel=1e-2)  # bfloat16 rounds other divisors


def test_a_large_batch_tells_what_sampling_alone_leaves(tmp_path: Path) -> None:
    """Halves of a batch 24 times as large agree better with each other than one step's batch does with them."""
    found = lines(tmp_path, batch=24)
    assert all(line["truth_sequences"] == 24 * 3 * 5 for line in found)
    assert all(line["truth_cosine"] < line["truth_split_cosine"] < 1 for line in found)
    assert found[0]["truth_split_cosine"] > 0.3
    assert "truth_cosine" not in lines(tmp_path / "none")[0]


def test_halves_add_up_to_the_whole() -> None:
    policy = Policy.load("tiny", load())
    rollouts = make_rollouts(policy, (3, 1, 5, 8))
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.0])
    batch = Batch.of(rollouts, advantages)
    assert batch is not None
    whole, first, second = (gradient(policy, each.sequences, each.weights, 4096) for each in (batch, *batch.halves()))
    for name, total in whole.items():
        assert torch.allclose(first[name] + second[name], total, atol=1e-6)
    assert Batch.of([], torch.zeros(0)) is None


def test_projections_and_cosines_are_those_of_vectors() -> None:
    a, b = ({"x": torch.tensor(x), "y": torch.tensor(y)} for x, y in (([3.0, 0.0], [4.0]), ([0.0, 2.0], [0.0])))
    zero = {name: torch.zeros_like(value) for name, value in a.items()}
    assert norm(a) == 5.0
    assert cosine(a, b) == 0.0
    assert cosine(a, a) == pytest.approx(1.0)
    assert cosine(a, zero) == 0.0
    assert projection(zero, a, b) == 0.0
    assert projection(zero, a, {"x": torch.tensor([1.0, 0.0]), "y": torch.zeros(1)}) == 3.0
