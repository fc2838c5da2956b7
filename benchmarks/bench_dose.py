"""The presets of `mismatch:`: the size that is solved for, and the dose that it causes on what nobody solved it on.

For each preset on each model: σ from frozen prefixes that the exact policy sampled; then rollouts of other prompts are
sampled with the noise, and both are measured there: KL(noisy ‖ exact) over the whole vocabulary, and K3 of the sampled
tokens with its standard error.

    python benchmarks/bench_dose.py [MODEL…]   writes results/dose.json, of other models what was there stays
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vexact.loop.questions import Questions
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tokenizer import load_tokenizer
from vexact.recipe import MismatchSection, Recipe, load_recipe
from vexact.recipe.mismatch import PRESETS, WEIGHT_PRESETS
from vexact.rollout.sampler import Sampler
from vexact.study.dose import Frozen
from vexact.study.mismatch import Mismatch
from vexact.tasks import load_task
from vexact_kernels import load

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
RESULT = ROOT / "benchmarks" / "results" / "dose.json"
RECIPES = {"tiny": "tiny_modsum.yaml", "tiny-modsum": "tiny_modsum.yaml", str(MODEL): "smollm2_chain_sum.yaml"}
SOLVED_ON, CONFIRMED_ON = dict.fromkeys(("tiny", "tiny-modsum"), (256, 1024)), (96, 160)  # prompts
LENGTH = 12  # tokens of a completion of the real model, one a prompt: its own answers have three
AT_ONCE = 4096


def rollouts(policy: Policy, recipe: Recipe, questions: Questions, first: int, count: int) -> list[Rollout]:
    items = [questions.task.item(first + i) for i in range(count)]
    requests = questions.requests(first, items)
    if Path(recipe.model.path).name == MODEL.name:
        requests = [replace(request, n=1, max_tokens=LENGTH, stop_ids=frozenset()) for request in requests]
    found = Sampler(policy, running=64).run(requests)
    return [rollout for rollout in found if rollout.completion]


def k3(sampled: list[Rollout], policy: Policy) -> tuple[float, float, int]:
    """Mean, its standard error and the number of tokens."""
    scored = policy.logprobs([rollout.scored for rollout in sampled], AT_ONCE).logprob.double()
    delta = scored - torch.cat([rollout.logprobs for rollout in sampled]).double()
    values = (delta.expm1() - delta).tolist()
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values)), len(values)


def measured(
    model: str, recipe: Recipe, preset: str, policy: Policy, questions: Questions, exact: list[Rollout]
) -> dict[str, Any]:
    """exact: rollouts of the exact policy, whose prefixes σ is solved on."""
    _, confirm = SOLVED_ON.get(model, CONFIRMED_ON)
    mismatch = Mismatch(MismatchSection(preset=preset), recipe.seed)
    dose = mismatch.begin(policy, lambda: exact, AT_ONCE)
    noisy = mismatch.sampler(policy, 0)
    fresh = rollouts(noisy, recipe, questions, 100_000, confirm)
    found, error, tokens = k3(fresh, policy)
    target = PRESETS.get(preset)
    whole = Frozen(policy, [rollout.scored for rollout in fresh], AT_ONCE).divergence(noisy)
    return {
        "model": Path(model).name,
        "preset": preset,
        "target": target,
        "sigma": mismatch.sigma,
        "solved_on_positions": None if dose is None else dose.positions,
        "solved_divergence": None if dose is None else dose.divergence,
        "tokens": tokens,
        "divergence": whole,
        "k3": found,
        "k3_standard_error": error,
        "off_target": None if target is None else whole / target - 1.0,
    }


def main() -> None:
    torch.set_num_threads(1)
    chosen = [model for model in RECIPES if not sys.argv[1:] or Path(model).name in sys.argv[1:]]
    before = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.is_file() else []
    rows = [row for row in before if row["model"] not in [Path(model).name for model in chosen]]
    for model, name in ((model, RECIPES[model]) for model in chosen):
        recipe = load_recipe(ROOT / "recipes" / name, {"model.path": model})
        policy = Policy.load(model, load(), torch.float32)
        questions = Questions(recipe, load_task(recipe.task, recipe.seed), load_tokenizer(model), policy.config)
        exact = rollouts(policy, recipe, questions, 0, SOLVED_ON.get(model, CONFIRMED_ON)[0])
        for preset in (*PRESETS, *WEIGHT_PRESETS):
            rows.append(measured(model, recipe, preset, policy, questions, exact))
            row = rows[-1]
            print(
                f"{row['model']:24} {preset:14} target {row['target'] or 0:<8g} sigma {row['sigma']:<10.4g} "
                f"divergence {row['divergence']:.3g}  K3 {row['k3']:.3g} ± {row['k3_standard_error']:.2g} "
                f"of {row['tokens']} tokens",
                flush=True,
            )
            RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
