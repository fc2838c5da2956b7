"""What a CPU computed on random checkpoints of known shapes, as bits, for a GPU to compare with.

    python benchmarks/gpu_golden.py     writes benchmarks/results/gpu_golden.json

The weights come from integers (`vexact.model.tiny`), so every machine has the same ones and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vexact.model.config import DTYPES
from vexact.model.gradients import Gradients
from vexact.model.parameters import stack
from vexact.model.policy import Policy, Scored
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact_kernels import Kernels, load

RESULTS = Path(__file__).parent / "results" / "gpu_golden.json"
# config.json of the published models, as far as it tells their shapes
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("qwen3", {}),
    "smollm2-135m": (
        "llama",
        {
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
            "vocab_size": 49152,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "vocab_size": 151936,
        },
    ),
    "qwen3-1.7b": (
        "qwen3",
        {
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "vocab_size": 151936,
        },
    ),
}
RECORDED = {"tiny": tuple(DTYPES), "smollm2-135m": ("float32", "bfloat16")}  # shape → dtypes that the golden holds


def policy_of(shape: str, kernels: Kernels, dtype: torch.dtype) -> Policy:
    """Random weights of a shape on the device of `kernels`."""
    family, changes = SHAPES[shape]
    config = tiny_config(family, **changes)
    weights = tiny_weights(config)
    return Policy.build(config, lambda name: stack(config, weights, name), kernels, dtype)


def tokens(policy: Policy, length: int, salt: int) -> list[int]:
    """Token ids from integers."""
    return [(index * 7919 + salt * 104729 + 11) % policy.config.vocab_size for index in range(length)]


def record(policy: Policy) -> dict[str, Any]:
    """Digest, sampled ids and log-probabilities, teacher-forced log-probabilities, gradients: bits or their hash."""
    requests = [
        Request(i, tokens(policy, length, i), n=2, temperature=t, seed=3, max_tokens=8)
        for i, (length, t) in enumerate([(5, 1.0), (63, 0.7), (70, 0.0)])
    ]
    rollouts = Sampler(policy, pages=32).run(requests)
    scored = [Scored(tokens(policy, length, 20 + length), 1) for length in (66, 9)]
    return {
        "digest": policy.digest,
        "sampled": [list(rollout.completion) for rollout in rollouts],
        "sampled_bits": [bits(rollout.logprobs) for rollout in rollouts],
        "scored_bits": bits(policy.logprobs(scored).logprob),
        "gradients": {name: hashed(tensor) for name, tensor in gradients(policy, scored)},
    }


def gradients(policy: Policy, scored: list[Scored]) -> Iterator[tuple[str, Tensor]]:
    """Of the log-probabilities and entropies, every stack's."""
    found = Gradients(policy.config, policy.ops.kernels)
    for _, result in policy.gradient_passes(scored, found):
        ones = torch.ones_like(result.logprob)
        torch.autograd.backward([result.logprob, result.entropy], [ones, -ones])
    yield from found.totals().items()


def bits(x: Tensor) -> list[int]:
    """float32 values as the integers behind them."""
    return x.detach().cpu().contiguous().view(torch.int32).flatten().tolist()


def hashed(x: Tensor) -> str:
    """Sixteen hexadecimal digits of a tensor's bytes."""
    return hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    golden: dict[str, dict[str, Any]] = {}
    for shape, dtypes in RECORDED.items():
        for dtype in dtypes:
            print(f"{shape} in {dtype}", flush=True)
            golden.setdefault(shape, {})[dtype] = record(policy_of(shape, load("cpu"), DTYPES[dtype]))
    RESULTS.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
