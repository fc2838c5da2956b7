"""The names of metrics: ours, and what dashboards made for TRL and for verl know. One table, for every logger.

metrics.jsonl keeps its plain names and gains all of these; W&B and TensorBoard get the whole line. `tim/*` is the
mismatch of arithmetic: recorded log-probabilities against those found again at the very same weights. TRL and verl
compare with the trainer's own weights, so with a sampler that is older theirs hold its staleness too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TIM = "tim/"  # before the names of study.metrics.measure_gap, at the weights that sampled
GAP = "gap/"  # before the same at the trainer's weights; most of these are known under other names only

# Theirs → ours. TRL: GRPOTrainer. Its ratios are behind its cap, in its default mode of whole sequences; here they are
# those of tokens before any cap, and a remedy's weights have names of their own (remedy_weight_*).
TRL = {
    "sampling/sampling_logp_difference/mean": "gap/abs_mean",
    "sampling/sampling_logp_difference/max": "gap/abs_max",
    "sampling/importance_sampling_ratio/min": "gap/ratio_min",
    "sampling/importance_sampling_ratio/mean": "gap/ratio_mean",
    "sampling/importance_sampling_ratio/max": "gap/ratio_max",
    "reward": "reward_mean",
    "completions/mean_length": "completion_length_mean",
    "completions/max_length": "completion_length_max",
    "clip_ratio/region_mean": "clip_fraction",
    "learning_rate": "lr",
}
# verl: rollout_corr_helper and metric_utils. Its `kl` is mean(log π_sampler − log π_train), k1.
VERL = {
    "rollout_corr/kl": "gap/k1",
    "rollout_corr/k3_kl": "gap/k3",
    "rollout_corr/log_ppl_diff": "gap/log_ppl_mean",
    "rollout_corr/log_ppl_abs_diff": "gap/log_ppl_abs_mean",
    "rollout_corr/log_ppl_diff_max": "gap/log_ppl_max",
    "rollout_corr/log_ppl_diff_min": "gap/log_ppl_min",
    "rollout_corr/ppl_ratio": "gap/ppl_ratio",
    "rollout_corr/chi2_token": "gap/chi2_token",
    "rollout_corr/chi2_seq": "gap/chi2_sequence",
    "rollout_corr/rollout_is_mean": "remedy_weight_mean",
    "rollout_corr/rollout_is_min": "remedy_weight_min",
    "rollout_corr/rollout_is_max": "remedy_weight_max",
    "rollout_corr/rollout_is_std": "remedy_weight_std",
    "training/rollout_probs_diff_mean": "gap/probability_mean",
    "training/rollout_probs_diff_max": "gap/probability_max",
    "training/rollout_probs_diff_std": "gap/probability_std",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/lr": "lr",
    "critic/score/mean": "reward_mean",
    "response_length/mean": "completion_length_mean",
    "response_length/max": "completion_length_max",
}
# What the trainer's weights make of it, under our own names.
OURS = {name: name for name in ("gap/k3", "gap/abs_max", "gap/ess", "gap/ess_sequence")}
NAMES = {**TRL, **VERL, **OURS}


def named(line: Mapping[str, Any], mismatch: Mapping[str, float], gap: Mapping[str, float]) -> dict[str, Any]:
    """A line with `tim/*` and with the other names of what it holds; a name whose measure it lacks is left out."""
    known = {**line, **{f"{GAP}{name}": value for name, value in gap.items()}}
    theirs = {name: known[ours] for name, ours in NAMES.items() if ours in known}
    return {**line, **{f"{TIM}{name}": value for name, value in mismatch.items()}, **theirs}
