"""Rollouts token by token: the numbers, the bits, and text that would like to be HTML."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from made_studies import MadeArm, dose_arms, write_study
from vexact.report import heatmap
from vexact.report.heatmap import Shown, chosen_arms, draw, rollouts_of
from vexact.report.reading import read_sources


def shown(sampler: list[float], trainer: list[float], tokens: tuple[str, ...] = ("a", "b"), prompt: str = "") -> Shown:
    q, p = np.array(sampler, np.float32), np.array(trainer, np.float32)
    q_bits, p_bits = (tuple(int(bit) for bit in each.view(np.int32)) for each in (q, p))
    return Shown(0, prompt, tokens, tuple(map(float, q)), tuple(map(float, p)), q_bits, p_bits)


def test_a_token_tells_both_log_probabilities_in_decimal_and_in_bits() -> None:
    page = draw([shown([-1.0, -0.5], [-1.0, -0.25])])
    assert "sampler -0.5 (bf000000) · trainer -0.25 (be800000) · Δ +0.25" in page
    assert "sampler -1 (bf800000) · trainer -1 (bf800000) · Δ 0, equal in every bit" in page
    assert page.count('class="t e"') == 1 and page.count('class="t u"') == 1


def test_the_two_zeros_are_not_equal() -> None:
    page = draw([shown([-0.0], [0.0], ("a",))])
    assert "80000000" in page and "00000000" in page and "equal in every bit" not in page.split("title=")[1]


def test_an_exact_rollout_is_all_zero() -> None:
    assert "all 2 tokens equal in every bit" in draw([shown([-1.0, -2.0], [-1.0, -2.0])])
    assert "1 of 2 tokens equal in every bit" in draw([shown([-1.0, -2.0], [-1.0, -2.0000002])])


HOSTILE = '<script>alert("x")</script>'


def test_text_stays_text() -> None:
    page = draw([shown([-1.0, -1.0], [-1.0, -2.0], (HOSTILE, "'\"><img src=x>"), prompt=HOSTILE)])
    assert "<script" not in page and "<img" not in page
    assert page.count("&lt;script&gt;") == 3, "prompt, token, and the token's title"


def test_text_that_is_not_escaped_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmap, "escape", str)
    assert "<script" in draw([shown([-1.0], [-1.0], (HOSTILE,))])


def test_the_rollout_with_the_largest_difference_comes_first(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [MadeArm("noisy", dose=1e-2)], seeds=1, steps=3)
    rollouts = rollouts_of(read_sources([folder]).arms[0])
    assert len(rollouts) == heatmap.ROLLOUTS and rollouts[0].largest == max(each.largest for each in rollouts)
    assert all(len(each.tokens) == len(each.sampler) for each in rollouts)
    assert Shown.read(rollouts[0].document()) == rollouts[0]


def test_the_exact_arm_and_the_most_different_ones_are_shown(tmp_path: Path) -> None:
    study = read_sources([write_study(tmp_path, dose_arms(), seeds=1, steps=3, rollouts=False)])
    largest = {arm.name: float(i) for i, arm in enumerate(study.arms)}
    chosen = [arm.name for arm in chosen_arms(study, largest)]
    assert chosen[0] == "exact" and len(chosen) == heatmap.ARMS and study.arms[-1].name in chosen
    assert "flip" not in chosen
