"""Real causes of mismatch on a real model, and beside each synthetic noise of the same K3.

    python benchmarks/bench_causes.py [--model models/SmolLM2-135M-Instruct] [--dtype float32 bfloat16] [--only CAUSE …]

Rollouts of the recipe smollm2_chain_sum's questions, with two examples before each, are sampled by a policy that the
cause has changed (`sampler` side) and scored by the exact one: Δ = log p_train − log q of sampled tokens. Nothing stops
a completion, so that all have one length, and how ΣΔ grows with it is seen on their beginnings: like the length itself
where Δ keeps its sign, like its square root where tokens are disturbed apart from one another. Beside it Gaussian noise
on the logits, constant in log-odds (`site: logits`), whose σ is scaled by K3 ∝ σ² from one dose that is solved for, and
what K3 it had. `missed-sync` and `stale-prefix` need weights of the step before: those of the checkpoint, and one step
of the recipe's optimizer behind it, with advantages of alternating sign. raw-logprob has Δ = 0; what it hides is the
mass that it does not draw from.
Writes benchmarks/results/causes.json, a row at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from timing import environment
from vexact.loop.questions import Questions
from vexact.model.checkpoint import load_weights
from vexact.model.config import DTYPES, ModelConfig
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tokenizer import load_tokenizer
from vexact.recipe import MismatchSection, Recipe, load_recipe
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.causes.drawing import nucleus
from vexact.study.distribution import Distribution, describe
from vexact.study.mismatch import Mismatch
from vexact.tasks import load_task
from vexact.training.trainer import Trainer
from vexact_kernels import Kernels, load

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "causes.json"
RECIPE = ROOT / "recipes" / "smollm2_chain_sum.yaml"
PROMPTS, SAMPLES, SHOTS = 4, 6, 2
LENGTHS = (8, 16, 32, 64)  # tokens of a completion's beginnings; the last is what is sampled
SOLVED_ON = 12  # rollouts
SOLVED = 1e-3  # the K3 that σ is scaled from
CAUSES = (
    MismatchSection(cause="split-k", degree=4),
    MismatchSection(cause="split-kv", degree=2),
    MismatchSection(cause="tensor-parallel", degree=2),
    MismatchSection(cause="tensor-parallel", degree=4),
    MismatchSection(cause="tensor-parallel", degree=8),
    MismatchSection(cause="bf16-logits"),
    MismatchSection(cause="bf16-head"),
    MismatchSection(cause="bf16-softmax"),
    MismatchSection(cause="bf16-rope"),
    MismatchSection(cause="recomputed-rope"),
    MismatchSection(cause="norm-cast"),
    MismatchSection(cause="fp8-kv"),
    MismatchSection(cause="int8-kv"),
    MismatchSection(cause="fp8-weights"),
    MismatchSection(cause="int8-weights"),
    MismatchSection(cause="int4-weights"),
    MismatchSection(cause="other-dtype"),
    MismatchSection(cause="torch"),
    MismatchSection(cause="temperature"),
    MismatchSection(cause="raw-logprob"),
    MismatchSection(cause="missed-sync", degree=1),
    MismatchSection(cause="stale-prefix"),
)


@dataclass(frozen=True)
class Subject:
    """policy: the exact one, a step behind `before`. sigma: of noise whose K3 is `SOLVED`."""

    policy: Policy
    before: Policy
    requests: Sequence[Request]
    sigma: float
    tokens_at_once: int

    def sampled(self, policy: Policy) -> list[Rollout]:
        return Sampler(policy).run(self.requests)

    def described(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Size, tail, and how Δ depends on the token's probability, on position and on length."""
        scored = self.policy.logprobs([rollout.scored for rollout in rollouts], self.tokens_at_once).logprob
        parts = scored.split([len(rollout.completion) for rollout in rollouts])
        pairs = list(zip((rollout.logprobs for rollout in rollouts), parts, strict=True))
        beginnings = ((length, describe([(q[:length], p[:length]) for q, p in pairs])) for length in LENGTHS)
        return {**summary(describe(pairs)), "by_length": [by_length(*each) for each in beginnings]}


def subject_of(recipe: Recipe, model: Path, dtype: torch.dtype, kernels: Kernels) -> Subject:
    config = ModelConfig.from_folder(model)
    weights = load_weights(model, config, dtype)
    trainer = Trainer.of(config, weights, kernels, dtype, recipe.loss, recipe.optimizer)
    del weights
    questions = Questions(recipe, load_task(recipe.task, recipe.seed), load_tokenizer(model), config)
    requests = [
        replace(request, n=SAMPLES, max_tokens=LENGTHS[-1], stop_ids=frozenset())
        for request in questions.requests(0, questions.items(0))[:PROMPTS]
    ]
    before = trainer.policy
    rollouts = Sampler(before).run(requests[:1])
    trainer.step(rollouts, torch.tensor([1.0 if i % 2 else -1.0 for i in range(len(rollouts))]))
    policy = trainer.policy
    del trainer
    mismatch = Mismatch(MismatchSection(site="logits", k3=SOLVED), recipe.seed)
    scored = [rollout.scored for rollout in Sampler(policy).run(requests)[::3]][:SOLVED_ON]
    dose = mismatch.solve(policy, scored, recipe.optimizer.tokens_at_once)
    return Subject(policy, before, requests, dose.sigma, recipe.optimizer.tokens_at_once)


def measured(subject: Subject, section: MismatchSection) -> dict[str, Any]:
    begin = time.perf_counter()
    policy = Mismatch(section, 0).sampler(subject.policy, 1, subject.before)
    rollouts = subject.sampled(policy)
    found = subject.described(rollouts)
    if section.cause == "raw-logprob":
        found["mass_not_drawn"] = undrawn(subject.policy, rollouts, section.top_p)
    row: dict[str, Any] = {"cause": section.cause, **parameters(section, subject.policy), "real": found}
    if found["k3"] > 0.0:
        sigma = subject.sigma * math.sqrt(found["k3"] / SOLVED)
        noise = MismatchSection(site="logits", sigma=sigma)
        noisy = Mismatch(noise, 0).sampler(subject.policy, 1)
        row["sigma"] = sigma
        row["synthetic"] = subject.described(subject.sampled(noisy))
    return {**row, "seconds": round(time.perf_counter() - begin, 1)}


def undrawn(policy: Policy, rollouts: Sequence[Rollout], top_p: float) -> float:
    """The probability of all tokens outside the nucleus, mean over positions."""
    kernels, lost = policy.ops.kernels, []
    for logits in policy.logits([rollout.scored for rollout in rollouts]):
        kept = nucleus(kernels, logits, torch.ones(len(logits)), top_p)
        p = logits.double().softmax(dim=1)
        lost.extend(torch.where(kept, 0.0, p).sum(dim=1).tolist())
    return math.fsum(lost) / len(lost)


def parameters(section: MismatchSection, policy: Policy) -> dict[str, Any]:
    degrees = ("split-k", "split-kv", "tensor-parallel", "missed-sync")
    found: dict[str, Any] = {"degree": section.degree} if section.cause in degrees else {}
    if section.cause == "other-dtype":
        found["dtype"] = section.dtype
    if section.cause == "temperature":
        found["temperature"] = section.temperature
    if section.cause == "raw-logprob":
        found["top_p"] = section.top_p
    return found


def summary(found: Distribution) -> dict[str, Any]:
    names = ("tokens", "differing", "k3", "abs_mean", "abs_p99", "abs_max", "extreme_fraction", "log_odds_mad")
    return {
        **{name: _short(found.measures[name]) for name in names},
        "tail_share": _short(found.tail_share),
        "by_probability": [
            {"low": b.low, "tokens": b.tokens, "abs_mean": _short(b.abs_mean), "log_odds_mad": _short(b.log_odds_mad)}
            for b in found.by_probability
        ],
        "by_position": [
            {"low": b.low, "abs_mean": _short(b.abs_mean), "log_odds_mad": _short(b.log_odds_mad)}
            for b in found.by_position
        ],
    }


def by_length(length: int, found: Distribution) -> dict[str, Any]:
    """Of ΣΔ of the first tokens of each completion, so many: its mean and its spread over completions."""
    return {"length": length, "sum_mean": _short(found.sequences.mean), "sum_std": _short(found.sequences.std)}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=DTYPES)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    recipe, kernels, console = load_recipe(RECIPE), load(), Console()
    recipe = replace(recipe, task=replace(recipe.task, options={**recipe.task.options, "shots": SHOTS}))
    rows: list[dict[str, Any]] = []
    for name in arguments.dtype:
        subject = subject_of(recipe, arguments.model, DTYPES[name], kernels)
        console.print(f"{name}: sigma {subject.sigma:.4g} gives K3 {SOLVED:g}")
        for section in CAUSES:
            if arguments.only and section.cause not in arguments.only:
                continue
            if section.cause == "other-dtype":
                section = replace(section, dtype="bfloat16" if name == "float32" else "float16")
            rows.append({"compute": name, **measured(subject, section)})
            console.print(line(rows[-1]))
            where = {"prompts": PROMPTS, "samples": SAMPLES, "tokens": LENGTHS[-1], "shots": SHOTS}
            content = {"environment": environment(), "sampled": where, "rows": rows}
            arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(table(rows))


def line(row: dict[str, Any]) -> str:
    real, noise = row["real"], row.get("synthetic", {})
    sizes = f"K3 {real['k3']:.3g}, noise {noise.get('k3', 0.0):.3g}"
    return f"{row['compute']} {row['cause']}: {sizes}, {row['seconds']:.0f} s"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    sums = [f"std of ΣΔ, {length}" for length in LENGTHS]
    columns = ("compute", "cause", "", "K3", "mean |Δ|", "p99", "max", "log-odds width", "top 1 % of K3", *sums)
    shown = Table(*columns, title="real causes and noise of equal K3", box=None)
    for row in rows:
        for kind in ("real", "synthetic"):
            if kind in row:
                found = row[kind]
                values = [found[n] for n in ("k3", "abs_mean", "abs_p99", "abs_max", "log_odds_mad", "tail_share")]
                values += [each["sum_std"] for each in found["by_length"]]
                shown.add_row(row["compute"], row["cause"], kind, *(f"{value:.3g}" for value in values))
    return shown


if __name__ == "__main__":
    main()
