"""A training step of the tiny model beside plain torch, and what the eight lanes of the gradients cost.

    python benchmarks/bench_step.py [--seconds 20] [--model models/SmolLM2-135M-Instruct | --no-model]

Tiny: 2 layers, width 64, 32 ids, 64 sequences of 24 tokens, one thread. Our step is the whole one of `Trainer`:
forward, loss, backward, clipping, AdamW, and the policy of the new weights. Beside it stands the same transformer in
plain torch, dense and unpadded, with autograd, and torch's fused AdamW behind it; nothing there is exact.

Lanes: forward and backward with all eight lanes beside one lane, which adds every token up in one chain and writes its
one buffer only; on tiny, and on the real model in one micro-batch and in eight. All candidates of a table take turns in
one process. Wall-clock medians are compared; the processor's time is beside them, because other work on the machine
lengthens the one and hardly the other. Writes benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from timing import MIN_ROUNDS, environment
from vexact.model.config import ModelConfig
from vexact.model.gradients import Gradients
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.model.tiny import named_config, tiny_weights
from vexact.recipe import LossSection, OptimizerSection
from vexact.training.trainer import Trainer
from vexact_kernels import load

RESULTS = Path(__file__).parent / "results" / "step.json"
MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
SEQUENCES, TOKENS = 64, 24
REAL = (16, 64)  # sequences and tokens of the real model
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LR = 1e-4
AIM = 0.05  # seconds of a step


@dataclass(frozen=True)
class Timed:
    """Medians over rounds: wall-clock and processor seconds of one call."""

    wall: float
    processor: float


def turns(candidates: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Timed]:
    """Each candidate once untimed, then all of them in turns for about `seconds`."""
    for call in candidates.values():
        call()
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    processor: dict[str, list[float]] = {name: [] for name in candidates}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < MIN_ROUNDS or time.perf_counter() < end:
        for name, call in candidates.items():
            begin, spent = time.perf_counter(), time.process_time()
            call()
            processor[name].append(time.process_time() - spent)
            wall[name].append(time.perf_counter() - begin)
        rounds += 1
    return {name: Timed(median(wall[name]), median(processor[name])) for name in candidates}


def sequences(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(vocabulary, (count, tokens), generator=generator).tolist()
    return ids


def our_step(config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Callable[[], object]:
    loss = LossSection(name="ppo", advantage="group_std", aggregation="token-mean")
    trainer = Trainer.of(config, weights, load("cpu"), dtype, loss, OptimizerSection(lr=LR), max_lag=1 << 30)
    recorded = trainer.policy.logprobs([Scored(ids, 1) for ids in sequences(SEQUENCES, TOKENS, config.vocab_size)])
    rollouts = [
        Rollout(i // 8, i % 8, ids[:1], ids[1:], logprobs, "length", 1.0, 0, trainer.policy.digest)
        for i, (ids, logprobs) in enumerate(
            zip(sequences(SEQUENCES, TOKENS, config.vocab_size), recorded.logprob.cpu().split(TOKENS - 1), strict=True)
        )
    ]
    advantages = torch.linspace(-1, 1, SEQUENCES)

    def step() -> None:
        if trainer.step(rollouts, advantages).skipped:
            raise RuntimeError("a step of the benchmark did not move the weights")

    return step


class Plain:
    """The same transformer in plain torch: parameters by Hugging Face name, one dense batch."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.config = config
        self.w = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in weights.items()}
        frequencies = config.rope.theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(TOKENS)[:, None] * frequencies
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        ids = torch.tensor(sequences(SEQUENCES, TOKENS, config.vocab_size))
        self.inputs, self.targets = ids[:, :-1], ids[:, 1:]
        self.advantage = torch.linspace(-1, 1, SEQUENCES)[:, None]
        with torch.no_grad():
            self.old = self.logprobs()
        self.optimizer = torch.optim.AdamW(list(self.w.values()), lr=LR, fused=True)

    def rotated(self, x: Tensor) -> Tensor:
        """x [B, heads, T, K]."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        config, w = self.config, self.w
        eps = config.rms_norm_eps

        def heads(part: str, normed: bool) -> Tensor:
            y = functional.linear(x, w[f"{prefix}.{part}_proj.weight"]).unflatten(-1, (-1, config.head_dim))
            if normed:
                y = functional.rms_norm(y, (config.head_dim,), w[f"{prefix}.{part}_norm.weight"], eps)
            return y.transpose(1, 2)

        q, k, v = heads("q", config.qk_norm), heads("k", config.qk_norm), heads("v", False)
        y = functional.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True, scale=config.attention_scale
        )
        return functional.linear(y.transpose(1, 2).flatten(2), w[f"{prefix}.o_proj.weight"])

    def logprobs(self) -> Tensor:
        config, w = self.config, self.w
        width, eps = (config.hidden_size,), config.rms_norm_eps
        x = functional.embedding(self.inputs, w["model.embed_tokens.weight"])
        for i in range(config.num_layers):
            layer = f"model.layers.{i}"
            y = functional.rms_norm(x, width, w[f"{layer}.input_layernorm.weight"], eps)
            x = x + self.attention(y, f"{layer}.self_attn")
            y = functional.rms_norm(x, width, w[f"{layer}.post_attention_layernorm.weight"], eps)
            gate = functional.silu(functional.linear(y, w[f"{layer}.mlp.gate_proj.weight"]))
            up = functional.linear(y, w[f"{layer}.mlp.up_proj.weight"])
            x = x + functional.linear(gate * up, w[f"{layer}.mlp.down_proj.weight"])
        x = functional.rms_norm(x, width, w["model.norm.weight"], eps)
        head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        logits = functional.linear(x, head).float()
        return logits.log_softmax(-1).gather(-1, self.targets[..., None])[..., 0]

    def backward(self) -> None:
        """Forward and backward of the same clipped loss."""
        self.optimizer.zero_grad()
        ratio = (self.logprobs() - self.old).exp()
        clipped = torch.minimum(ratio * self.advantage, ratio.clamp(0.8, 1.2) * self.advantage)
        (-clipped).mean().backward()

    def step(self) -> None:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.w.values(), 1.0)
        self.optimizer.step()


def lanes(policy: Policy, count: int, tokens: int, at_once: int) -> dict[str, Callable[[], object]]:
    """Forward and backward with eight lanes, and with one."""
    scored = [Scored(ids, 1) for ids in sequences(count, tokens, policy.config.vocab_size)]

    def passes(one_lane: bool) -> Callable[[], object]:
        gradients = Gradients(policy.config, policy.ops.kernels)

        def run() -> None:
            gradients.clear()
            for _, result in policy.gradient_passes(scored, gradients, at_once, one_lane=one_lane):
                result.logprob.backward(torch.ones_like(result.logprob))

        return run

    return {"eight lanes": passes(False), "one lane": passes(True)}


def compared(times: Mapping[str, Timed], base: str) -> list[dict[str, Any]]:
    """Rows with the ratio of each to the one named `base`."""
    return [
        {
            "what": name,
            "ms": 1e3 * timed.wall,
            "processor_ms": 1e3 * timed.processor,
            "times": timed.wall / times[base].wall,
            "processor_times": timed.processor / times[base].processor,
        }
        for name, timed in times.items()
    ]


def measure(folder: Path | None, seconds: float) -> dict[str, list[dict[str, Any]]]:
    config = named_config("tiny-modsum")
    if config is None:
        raise RuntimeError("the tiny model has gone")
    weights, tables = tiny_weights(config), {}
    for name, dtype in DTYPES.items():
        plain = Plain(config, weights, dtype)
        candidates = {
            "plain torch, forward and backward": plain.backward,
            "plain torch, whole step": plain.step,
            "vexact, whole step": our_step(config, weights, dtype),
        }
        key = f"tiny step, {name}"
        tables[key] = compared(turns(candidates, seconds), "plain torch, whole step")
    for name, dtype in DTYPES.items():
        policy = Policy.load("tiny-modsum", load("cpu"), dtype)
        found = turns(lanes(policy, SEQUENCES, TOKENS, 4096), seconds / 2)
        tables[f"lanes, tiny, {name}"] = compared(found, "one lane")
    if folder is not None:
        policy = Policy.load(folder, load("cpu"), torch.bfloat16)
        for cuts in (1, 8):
            at_once = math.prod(REAL) // cuts
            found = turns(lanes(policy, *REAL, at_once), seconds)
            tables[f"lanes, SmolLM2-135M, bfloat16, {cuts} micro-batches"] = compared(found, "one lane")
    return tables


def show(tables: Mapping[str, list[dict[str, Any]]]) -> None:
    for title, rows in tables.items():
        table = Table(title=title)
        for column in ("what", "ms", "processor ms", "times", "of processor"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for row in rows:
            figures = (f"{row['ms']:.2f}", f"{row['processor_ms']:.2f}", f"{row['times']:.3f}")
            table.add_row(row["what"], *figures, f"{row['processor_times']:.3f}")
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each table")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--no-model", action="store_true", help="tiny only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = None if arguments.no_model or not arguments.model.is_dir() else arguments.model
    begin = os.getloadavg()[0]
    tables = measure(folder, arguments.seconds)
    show(tables)
    load_of = {"load_before": begin, "load_behind": os.getloadavg()[0], "cores": os.cpu_count()}
    aim = {"seconds": AIM}
    RESULTS.write_text(json.dumps({"environment": {**environment(), **load_of}, "aim": aim, **tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()
