"""The mismatch of two engines with themselves, on the same sampled tokens of a real model.

vexact: the log-probabilities that its sampler recorded, against its own re-scoring. transformers: a left-padded batch
over a cache, step by step as `generate` computes, against one unpadded forward a sequence. Both on the tokens that
vexact sampled, in each dtype. Prints a table and writes benchmarks/results/headline.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from timing import environment
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tokenizer import load_tokenizer
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.testing import compare_bits
from vexact.verification.control import chosen, huggingface, logits_alone, logits_batched
from vexact.verification.subject import ALL, Sizes, Subject
from vexact_kernels import Kernels, load

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little",
    "Q: 3 + 4 = ?\nA: 7\nQ: 5 + 9 = ?\nA:",
    "Water boils when",
    "def add(a, b):\n    return",
    "The three most important things to know about learning a language are",
    "In 1969, for the first time,",
    "My favourite recipe for a cold winter evening begins with",
)
TOKENS = 48
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One engine in one dtype. Differences are of natural logarithms; ratios are exp of them, on the same tokens."""

    engine: str
    dtype: str
    tokens: int
    share_bit_equal: float
    max_abs_difference: float
    mean_abs_difference: float
    argmax_flips: int
    ratio_lowest: float
    ratio_highest: float
    seconds: float


def row(engine: str, dtype: str, sampled: Tensor, scored: Tensor, flips: int, seconds: float) -> Row:
    """sampled, scored: float32 [tokens], what the two paths of one engine say."""
    found = compare_bits(sampled, scored)
    difference = scored.double() - sampled.double()
    return Row(
        engine=engine,
        dtype=dtype,
        tokens=found.compared,
        share_bit_equal=1.0 - found.differ / found.compared,
        max_abs_difference=float(difference.abs().max()),
        mean_abs_difference=float(difference.abs().mean()),
        argmax_flips=flips,
        ratio_lowest=float(difference.min().exp()),
        ratio_highest=float(difference.max().exp()),
        seconds=round(seconds, 2),
    )


def sample(policy: Policy, prompts: Sequence[Sequence[int]]) -> list[Rollout]:
    """One rollout of 48 tokens a prompt; nothing ends it early."""
    requests = [Request(i, prompt, seed=1, max_tokens=TOKENS) for i, prompt in enumerate(prompts)]
    return Sampler(policy).run(requests)


def vexact_row(policy: Policy, dtype: str, rollouts: Sequence[Rollout], seconds: float) -> Row:
    begun = time.perf_counter()
    scored = policy.logprobs([rollout.scored for rollout in rollouts]).logprob
    seconds += time.perf_counter() - begun
    recorded = torch.cat([rollout.logprobs for rollout in rollouts])
    return row("vexact", dtype, recorded, scored, argmax_flips(policy, rollouts), seconds)


def argmax_flips(policy: Policy, rollouts: Sequence[Rollout]) -> int:
    """Positions at which decoding over pages and one whole forward would take different tokens as the likeliest."""
    subject = Subject(policy, Sizes(0, 0, 0, 0, 0, 0))
    sequences = [rollout.tokens[:-1] for rollout in rollouts]
    whole, decoded = (completion_argmax(subject, sequences, rollouts, size) for size in (ALL, 1))
    return int((whole != decoded).sum())


def completion_argmax(
    subject: Subject, sequences: Sequence[Sequence[int]], rollouts: Sequence[Rollout], size: int
) -> Tensor:
    """int64 [tokens] in chunks of `size`: the likeliest id where each token of the completions was drawn."""
    each = subject.logits_in_cuts(sequences, size).split([len(tokens) for tokens in sequences])
    return torch.cat(
        [logits[len(rollout.prompt) - 1 :].argmax(-1) for rollout, logits in zip(rollouts, each, strict=True)]
    )


def transformers_row(policy: Policy, dtype: str, rollouts: Sequence[Rollout]) -> Row:
    """transformers with the same weights, teacher-forced with vexact's tokens."""
    model = huggingface(policy)
    begun = time.perf_counter()
    alone, batched = logits_alone(model, rollouts), logits_batched(model, rollouts, TOKENS)
    seconds = time.perf_counter() - begun
    flips = int((torch.cat(alone).argmax(-1) != torch.cat(batched).argmax(-1)).sum())
    return row("transformers", dtype, chosen(batched, rollouts), chosen(alone, rollouts), flips, seconds)


def measure(model: str, kernels: Kernels) -> list[Row]:
    """Both engines in both dtypes."""
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    rows = []
    for name, dtype in DTYPES.items():
        policy = Policy.load(model, kernels, dtype)
        begun = time.perf_counter()
        rollouts = sample(policy, prompts)
        rows.append(vexact_row(policy, name, rollouts, time.perf_counter() - begun))
        rows.append(transformers_row(policy, name, rollouts))
    return rows


def table(rows: Sequence[Row]) -> Table:
    view = Table(
        title=f"the same {rows[0].tokens} tokens, sampled and scored",
        caption="Δ: of log-probabilities; flips: another likeliest token; ratios: exp Δ",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        padding=0,
    )
    for title in ("engine", "dtype"):
        view.add_column(title, no_wrap=True)
    for title in ("bit-equal", "max |Δ|", "mean |Δ|", "flips", "ratios"):
        view.add_column(title, justify="right", no_wrap=True)
    for each in rows:
        exact = each.ratio_lowest == each.ratio_highest == 1.0
        view.add_row(
            each.engine,
            each.dtype,
            f"{each.share_bit_equal:.1%}",
            f"{each.max_abs_difference:.2g}",
            f"{each.mean_abs_difference:.2g}",
            str(each.argmax_flips),
            "1" if exact else f"{each.ratio_lowest:.5f}–{each.ratio_highest:.5f}",
        )
    return view


def main(
    model: str = "models/SmolLM2-135M-Instruct", to: Path = Path(__file__).parent / "results" / "headline.json"
) -> None:
    """Measure on MODEL, print the table, write JSON to TO."""
    rows = measure(model, load("cpu"))
    Console().print(table(rows))
    to.parent.mkdir(parents=True, exist_ok=True)
    document = {"model": Path(model).name, "environment": environment(), "rows": [asdict(each) for each in rows]}
    to.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
