"""Studies made of formulas, in the form that `vexact study` leaves: no model was trained for them.

Success rises to a level that falls with the dose, K3 is the dose with a little noise, collapse is a step put by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

COLLAPSE_AT = 0.04  # the dose beyond which a made arm collapses


@dataclass(frozen=True)
class MadeArm:
    name: str
    role: str = "arm"
    dose: float = 0.0
    overrides: dict[str, Any] = field(default_factory=dict)
    label: str = ""


def dose_arms(doses: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1)) -> list[MadeArm]:
    """An exact arm, two null arms, and for each dose the sampler's and both sides' noise."""
    arms = [MadeArm("exact", "exact", label="Exact"), MadeArm("flip", "null", label="Exact, one token flipped"),
            MadeArm("draws", "null", label="Exact, other draws")]  # fmt: skip
    for dose in doses:
        size = {"mismatch": {"site": "logits", "k3": dose}}
        for side in ("sampler", "both-shared"):
            overrides = {"mismatch": {**size["mismatch"], "side": side}}
            made = dose if side == "sampler" else 0.0
            arms.append(MadeArm(f"{side}-{dose:g}", "arm", made, overrides, f"{side} {dose:g}"))
    return arms


def remedy_arms(dose: float = 3e-2) -> list[MadeArm]:
    names = ("none", "token-tis", "sequence-tis", "icepop", "cis", "centring", "dlc")
    return [
        MadeArm(f"remedy-{name}", "arm", dose / (1 + 3 * i),
                {"mismatch": {"k3": dose, "side": "sampler"}, "loss": {"remedy": {"token": name}}},
                f"{name} at K3 {dose:g}")
        for i, name in enumerate(names)
    ]  # fmt: skip


def write_study(
    folder: Path, arms: Sequence[MadeArm], seeds: int = 3, steps: int = 120, every: int = 5, rollouts: bool = True
) -> Path:
    """A study's folder. every: steps between evaluations. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, endpoints = [], {}
    for number, arm in enumerate(arms):
        runs, success, collapse = [], [], []
        for seed in range(seeds):
            digest = f"{number:04x}{seed:04x}"
            lines = metric_lines(arm, seed, number, steps, every)
            write_run(folder / "runs" / digest, lines, steps, arm.overrides, seed)
            if rollouts and seed == 0:
                write_rollouts(folder / "runs" / digest, arm.dose, number)
            runs.append({"seed": seed, "folder": f"runs/{digest}", "digest": digest})
            success.append(lines[-1]["eval_success"])
            collapse.append(_collapse(arm.dose, steps) if arm.dose > COLLAPSE_AT else None)
        rows.append({"name": arm.name, "role": arm.role, "label": arm.label or arm.name, "overrides": arm.overrides,
                     "runs": runs})  # fmt: skip
        endpoints[arm.name] = {"late_trainer": success, "peak_trainer": success, "collapse_step": collapse}
    results = {
        "study": "made", "title": "A made study: does mismatch alone harm?",
        "question": "Does mismatch alone harm learning, and how does harm grow with its size?",
        "arms": rows, "endpoints": endpoints, "claims": CLAIMS,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))
    return folder


CLAIMS = [
    {"id": "A1", "claim": "Large mismatch at the sampler lowers held-out success.",
     "rule": "median gap to both-shared outside the range of all null gaps", "verdict": "confirmed here",
     "numbers": {"gap": -0.41, "null_low": -0.06, "null_high": 0.05}},
    {"id": "A2", "claim": "Calibrated size (K3 of bf16-dense) harms.",
     "rule": "as A1, at K3 6e-4", "verdict": "inconclusive", "numbers": {"gap": 0.0123456, "p": None}},
    {"id": "A3", "claim": "The discrepancy grows while the policy learns.", "rule": "slope of K3 above 0 in most seeds",
     "verdict": "not testable by construction", "numbers": {}},
    {"id": "A4", "claim": "The placebo harms as much.", "rule": "both-shared below the null range",
     "verdict": "opposite", "numbers": {"gaps": [0.01, 0.02, float("nan")]}},
]  # fmt: skip


def metric_lines(arm: MadeArm, seed: int, number: int, steps: int, every: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng([seed, number if arm.role != "exact" else 0])
    level = 0.9 - 0.5 * min(1.0, arm.dose * 8)
    lines = []
    for step in range(-1, steps):
        done = step + 1
        success = 0.45 + (level - 0.45) * (1 - math.exp(-done / 40)) + float(draw.normal(0, 0.02))
        if arm.dose > COLLAPSE_AT and done > _collapse(arm.dose, steps):
            success *= 0.25
        line: dict[str, Any] = {"step": step}
        if step >= 0:
            k3 = arm.dose * math.exp(float(draw.normal(0, 0.3)))
            line |= {
                "reward_mean": success, "grad_norm": math.exp(float(draw.normal(0, 0.5))) * (1 + 40 * arm.dose),
                "entropy": 0.8 * math.exp(-done / 60) + 0.05, "tim/k3": k3,
                "tim/ess": math.exp(-12 * k3 * done / steps), "tim/abs_max": 8 * math.sqrt(k3),
                "rollout_corr/k3_kl": k3, "fingerprint": "00",
            }  # fmt: skip
        if done % every == 0 or done == steps:
            line |= {
                "eval_success": min(1.0, max(0.0, success)),
                "eval_sampler_success": min(1.0, max(0.0, success - 2 * arm.dose)),
            }
        lines.append(line)
    return lines


def _collapse(dose: float, steps: int) -> int:
    return round(steps * min(0.8, 0.05 / dose))


def write_run(
    folder: Path, lines: Sequence[dict[str, Any]], steps: int, overrides: dict[str, Any], seed: int = 0
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"name": "made", "seed": seed, "steps": steps, "model": {"path": "tiny-modsum"}, **overrides}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_rollouts(folder: Path, dose: float, number: int, text: str = "3+4=7,") -> Path:
    """Step 0 of a run: sixteen rollouts of thirty tokens whose Δ has about that K3."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    draw = np.random.default_rng(number)
    rollouts, tokens = 16, 30
    sampler = -draw.exponential(0.8, (rollouts, tokens)).astype(np.float32)
    trainer = np.minimum(sampler + draw.normal(0, math.sqrt(2 * dose), sampler.shape), 0).astype(np.float32)
    if dose == 0:
        trainer = sampler.copy()
    bits = lambda x: [row.view(np.int32).tolist() for row in x]  # noqa: E731
    columns = {
        "step": [0] * rollouts, "version": [0] * rollouts, "prompt": ["<b>8+8</b>="] * rollouts,
        "completion": [text] * rollouts, "completion_ids": draw.integers(0, 28, (rollouts, tokens)).tolist(),
        "sampler_logprobs": sampler.tolist(), "trainer_logprobs": trainer.tolist(),
        "sampler_logprobs_bits": bits(sampler), "trainer_logprobs_bits": bits(trainer), "reward": [1.0] * rollouts,
    }  # fmt: skip
    path = folder / "rollouts" / "step-000000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    floats = pa.list_(pa.float32())
    table = pa.table({
        name: pa.array(values, floats if name.endswith("logprobs") else None) for name, values in columns.items()
    })  # fmt: skip
    parquet.write_table(table, path)
    return path
