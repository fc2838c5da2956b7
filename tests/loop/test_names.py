"""The names that dashboards know: each points at something, and at the right thing."""

from __future__ import annotations

import torch

from vexact.loop.names import GAP, NAMES, OURS, named
from vexact.study.metrics import IDEAL, measure_gap


def test_every_name_of_theirs_is_a_measure_of_ours_or_a_plain_name() -> None:
    measures = {f"{GAP}{name}" for name in IDEAL}
    plain = {"reward_mean", "completion_length_mean", "completion_length_max", "clip_fraction", "lr", "entropy",
             "grad_norm"} | {f"remedy_weight_{name}" for name in ("mean", "min", "max", "std")}  # fmt: skip
    assert set(NAMES.values()) <= measures | plain


def test_theirs_are_at_the_trainers_weights_and_ours_at_the_samplers() -> None:
    recorded = torch.tensor([-1.0, -2.0])
    same, moved = measure_gap([(recorded, recorded)]), measure_gap([(recorded, recorded + 0.25)])
    line = named({"step": 3, "entropy": 0.5}, same, moved)
    assert line["tim/k1"] == 0.0 and line["tim/tokens"] == 2
    assert line["rollout_corr/kl"] == -0.25  # verl: log π_sampler − log π_train
    assert line["rollout_corr/log_ppl_diff"] == -0.25
    assert line["sampling/sampling_logp_difference/max"] == 0.25
    assert line["training/rollout_probs_diff_max"] > 0
    assert line["actor/entropy"] == line["entropy"] == 0.5
    assert "reward" not in line and {name for name in line if name.startswith(GAP)} == set(OURS)
