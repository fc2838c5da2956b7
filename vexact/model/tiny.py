"""`tiny`: a small random model of the project's own, with the same bits on every machine.

Random weights hide faults unless three rules are kept: norm weights lie in [0.5, 1.5] and are not all ones, biases are
not zero, and logits span at least ±15. The numbers come from the integers of a counter-based generator (Philox), the
arithmetic on them is exact, and each tensor has a stream of its own, so nothing depends on order or on a library's
distributions.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vexact.model.checkpoint import shapes
from vexact.model.config import ARCHITECTURES, ModelConfig
from vexact.model.tokenizer import BYTES_KEY, TINY, ByteTokenizer, load_tokenizer

LOGIT_SPREAD = 4.5  # standard deviation of a logit: ±15 is met within a few thousand of them, and sampling stays varied
BRANCH = 2.5  # size of what a layer adds: several times an embedding, or a tied head would repeat the last token
EMBEDDED = 0.6  # size of an embedding's entries where they are not the head's too


def tiny_config(family: str = "qwen3", **changes: Any) -> ModelConfig:
    """2 layers, width 64, 4 query and 2 key/value heads of size 32, 320 ids; bytes and three specials are known.

    `changes` are keys of config.json that replace or join the ones here.
    """
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        BYTES_KEY: "bytes",
        "bos_token_id": ByteTokenizer.bos,
        "dtype": "float32",
        "eos_token_id": ByteTokenizer.eos,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 160,
        "max_position_embeddings": 2048,
        "model_type": family,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": ByteTokenizer.pad,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": 320,
        **changes,
    }
    return ModelConfig.from_dict(raw, source="tiny")


def named_config(path: str | Path) -> ModelConfig | None:
    """The config of `tiny` or `tiny-modsum` (32 ids, of which modsum's tokenizer knows 31); None for a folder."""
    name = str(path)
    if name not in TINY:
        return None
    tokenizer = load_tokenizer(name)
    if isinstance(tokenizer, ByteTokenizer):
        return tiny_config()
    special = {f"{kind}_token_id": getattr(tokenizer, kind) for kind in ("bos", "eos", "pad")}
    return tiny_config(**{BYTES_KEY: TINY[name]}, **special, vocab_size=-(-tokenizer.size // 16) * 16)


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters of `config` under their Hugging Face names, in the dtype that it names."""
    return {name: _tensor(config, name, shape, seed).to(config.dtype) for name, shape in shapes(config).items()}


def _tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if len(shape) == 1 and not name.endswith("bias"):
        values = 0.5 + _uniform(name, seed, shape)
    elif len(shape) == 1:
        values = 0.25 + 0.75 * _uniform(name, seed, shape)
        values *= np.where(_uniform(name + "/sign", seed, shape) < 0.5, -1.0, 1.0)
    else:
        values = _scale(config, name, shape) * _bell(name, seed, shape)
    return torch.from_numpy(values.astype(np.float32))


def _scale(config: ModelConfig, name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a matrix's entries, each from the size that its product should have."""
    columns = math.sqrt(shape[1])
    embedding = name.startswith("model.embed_tokens")
    if name.startswith("lm_head") or (embedding and config.tie_word_embeddings):
        return LOGIT_SPREAD / columns
    if embedding:
        return EMBEDDED
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 2 * BRANCH / columns  # averaging over keys, and silu(gate) · up, halve the size of what comes in
    return 1 / columns


def _words(name: str, seed: int, count: int) -> NDArray[np.uint64]:
    """The first words of the stream that belongs to a tensor's name."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def _uniform(name: str, seed: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Multiples of 2^-24 in [0, 1)."""
    return ((_words(name, seed, math.prod(shape)) >> np.uint64(40)) * 2.0**-24).reshape(shape)


def _bell(name: str, seed: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Mean 0, standard deviation 1: the sum of a word's four 16-bit parts, centred; nearly normal."""
    words = _words(name, seed, math.prod(shape))
    parts = sum((words >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.float64) for i in range(4))
    return ((parts - 2 * 65535.0) * (math.sqrt(3.0) / 65536.0)).reshape(shape)
