"""A real pair of engines, described: the figures of a sample of rollouts that vLLM left; and made-up pairs."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from vexact.study.distribution import describe, tail_share
from vexact.study.dumps import read_pair

SAMPLE = Path(__file__).parents[1] / "data" / "vllm_cpu_bf16_smollm2_sample.jsonl.gz"
# transformers less vLLM, 3,840 tokens: bit-equal, mean, p99 and max |Δ|, K1, K3; mean |Δ| by the probability that
# transformers gives (< .5, .5–.9, .9–.99, .99–.999, above); least and greatest ΣΔ; share of K3 in 1 % of the tokens.
FIGURES = {
    "hf_bf16": (4, 0.04426, 0.20731, 0.36052, 1.741e-3, 2.052e-3, (0.05549, 0.02203, 0.00391, 0.00042, 3e-5),
                -1.818, 1.031, 0.147),
    "hf_fp32": (4, 0.03544, 0.15828, 0.45539, 6.431e-4, 1.286e-3, (0.04446, 0.01711, 0.00345, 0.00036, 2e-5),
                -1.716, 1.362, 0.160),
}  # fmt: skip


@pytest.mark.parametrize("column", FIGURES)
def test_a_real_pair_has_the_figures_that_were_found_by_other_means(column: str) -> None:
    """Digits as written: they were computed by numpy alone, from the file."""
    equal, abs_mean, p99, largest, k1, k3, by_probability, least, greatest, tail = FIGURES[column]
    found = describe(read_pair(str(SAMPLE), f"{SAMPLE}:{column}").pairs)
    measures = found.measures
    assert measures["tokens"] == 3840 and measures["tokens"] - measures["differing"] == equal
    assert [measures[name] for name in ("abs_mean", "abs_p99", "abs_max")] == pytest.approx(
        [abs_mean, p99, largest], abs=5.1e-6
    )
    assert [measures["k1"], measures["k3"]] == pytest.approx([k1, k3], rel=4e-4)
    assert [each.abs_mean for each in found.by_probability] == pytest.approx(by_probability, abs=5.1e-6)
    assert [found.sequences.min, found.sequences.max] == pytest.approx([least, greatest], abs=5.1e-4)
    assert found.tail_share == pytest.approx(tail, abs=5.1e-4)
    swapped = describe(read_pair(f"{SAMPLE}:{column}", str(SAMPLE)).pairs)
    assert swapped.measures["k1"] == -measures["k1"]  # the mutant: the other sign


def test_the_width_of_a_real_pair_is_nearly_constant_in_log_odds_and_not_in_nats() -> None:
    bins = describe(read_pair(str(SAMPLE), f"{SAMPLE}:hf_bf16").pairs).by_probability[:4]
    widths = [each.log_odds_mad for each in bins]
    assert max(widths) < 1.6 * min(widths)
    assert bins[0].abs_mean > 100 * bins[3].abs_mean


def test_bins_hold_every_token_once_and_all_of_k3() -> None:
    found = describe(read_pair(str(SAMPLE), f"{SAMPLE}:hf_bf16").pairs)
    for bins in (found.by_probability, found.by_position):
        assert sum(each.tokens for each in bins) == 3840
        assert sum(each.differing for each in bins) == found.measures["differing"]
        assert math.fsum(each.share for each in bins) == pytest.approx(1.0)
        assert math.fsum(each.k3 * each.tokens for each in bins) / 3840 == pytest.approx(found.measures["k3"])
        assert all(low.high == high.low for low, high in pairwise(bins))
    assert [each.low for each in found.by_position] == [0, 8, 16, 32, 64, 128]
    assert [each.tokens for each in found.by_position] == [24 * n for n in (8, 8, 16, 32, 64, 32)]


def test_the_slope_on_length_is_that_of_the_line_and_absent_where_there_is_none() -> None:
    lengths = (10, 20, 40, 80)
    pairs = [(torch.full((n,), -2.0), torch.full((n,), -2.0 - 1 / 64)) for n in lengths]
    found = describe(pairs).sequences
    assert found.per_1000 == found.slope_per_1000 == -1000 / 64
    assert found.slope_error == 0.0
    assert (found.shortest, found.longest, found.min, found.max) == (10, 80, -80 / 64, -10 / 64)
    shifted = [(q, torch.cat([p[:1] + 0.5, p[1:]])) for q, p in pairs]
    moved = describe(shifted).sequences
    assert moved.slope_per_1000 == pytest.approx(-1000 / 64) and moved.per_1000 > moved.slope_per_1000  # type: ignore[operator]
    assert describe(pairs[:1] * 5).sequences.slope_per_1000 is None


def test_equal_sides_are_described_by_zeros() -> None:
    q = -3.0 * torch.rand(50, generator=torch.Generator().manual_seed(1))
    found = describe([(q, q.clone()), (q[:7], q[:7].clone())])
    for each in (*found.by_probability, *found.by_position):
        assert (each.differing, each.mean, each.abs_max, each.k3, each.share, each.log_odds_mad) == (0, 0, 0, 0, 0, 0)
    assert (found.tail_share, found.sequences.per_1000, found.sequences.std) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="nothing to describe"):
        describe([])


def test_the_tail_is_the_top_hundredth() -> None:
    parts = np.ones(200)
    assert tail_share(parts) == 0.01
    parts[[3, 77]] = 99.0
    assert tail_share(parts) == pytest.approx(0.5)
