"""Where TRL has the formula of a remedy, answers agree. Runs where TRL is installed, on its function alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from vexact.model.remedy import Ratios
from vexact.study.remedies import NegativesMask
from vexact_kernels import load

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own
LENGTHS = [1, 4, 2, 7, 5, 3]
CUTS = [slice(a, b) for a, b in pairwise(torch.tensor([0, *LENGTHS]).cumsum(0).tolist())]


@pytest.fixture(scope="module")
def trainer() -> Any:
    return pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).GRPOTrainer


def test_the_mask_of_negatives(trainer: Any) -> None:
    """`get_off_policy_mask`: Eq. 9 of DeepSeek-V3.2, with the sampler's log-probabilities as π_old."""
    generator = torch.Generator().manual_seed(1)
    sampler = -3 * torch.rand(sum(LENGTHS), generator=generator)
    current = sampler + 0.5 * torch.randn(len(sampler), generator=generator)
    advantages = torch.tensor([-1.0, -0.5, -2.0, 1.0, -0.1, 0.5])
    mask = torch.zeros(len(LENGTHS), max(LENGTHS))
    columns = torch.zeros(2, len(LENGTHS), max(LENGTHS))
    for row, cut in enumerate(CUTS):
        mask[row, : LENGTHS[row]] = 1.0
        columns[:, row, : LENGTHS[row]] = torch.stack([current[cut], sampler[cut]])
    expected = trainer.get_off_policy_mask(advantages[:, None], columns[0], columns[1], mask, 0.1)[:, 0].bool()
    log = current - sampler
    ratios = Ratios(log, log, CUTS, load(), None, sampler)
    given = advantages.repeat_interleave(torch.tensor(LENGTHS))
    kept = NegativesMask(0.1).weights(ratios, torch.ones(len(log), dtype=torch.bool), given).kept
    assert [bool(kept[cut][0]) for cut in CUTS] == expected.tolist()
    assert 0 < int(expected.sum()) < len(LENGTHS)
