"""Shapes of models that recipes name and that a dry run can do without: the config.json of their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vexact.model.config import ModelConfig

# huggingface.co/Qwen/Qwen3-0.6B and Qwen3-1.7B, as of 2025
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
}


def known_config(path: str | Path) -> ModelConfig | None:
    """The shape of a model whose folder has a name that is known, in capitals or not; None of others."""
    raw = _SHAPES.get(Path(path).name.lower())
    return None if raw is None else ModelConfig.from_dict(raw, source=str(path))
