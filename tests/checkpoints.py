"""Tiny random checkpoints for tests: Qwen3-, Qwen2- and Llama-shaped, with tokenizers of 300 ids.

They keep three rules without which many faults stay invisible: norm weights in [0.5, 1.5], biases that are not zero,
logits that span at least ±15.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from vexact.model.checkpoint import save_folder
from vexact.model.config import ModelConfig
from vexact.model.tiny import tiny_config, tiny_weights

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
BOS, EOS, SIZE = 297, 298, 300  # of the tokenizers below; 299 is <|user|>
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"


def q3(**changes: Any) -> ModelConfig:
    """Qwen3 kind: heads × head_dim ≠ hidden, q/k norm, tied, 320 ids of which a tokenizer knows 300."""
    return _config("qwen3", **changes)


def q2(**changes: Any) -> ModelConfig:
    """Qwen2 kind: 7 query heads on 1 key/value head, biases, untied."""
    shape = {
        "head_dim": 16,
        "hidden_size": 112,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "vocab_size": 1000,
    }
    return _config("qwen2", **{**shape, **changes})


def l3(**changes: Any) -> ModelConfig:
    """Llama kind: untied, llama3 rope scaling of an original length of 64."""
    shape = {
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3},
        "tie_word_embeddings": False,
    }
    return _config("llama", **{**shape, **changes})


FAMILIES = {"qwen3": q3, "qwen2": q2, "llama": l3}


def _config(family: str, **changes: Any) -> ModelConfig:
    own = {"bos_token_id": BOS, "dtype": "bfloat16", "eos_token_id": EOS, "pad_token_id": EOS}
    config = tiny_config(family, **{**own, **changes})
    raw = {key: value for key, value in config.raw.items() if not key.startswith("_")}
    return ModelConfig.from_dict(raw, source=family)


def build(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor] | None = None, adds_bos: bool = False
) -> Path:
    """A whole Hugging Face folder with a tokenizer; weights are random unless given."""
    save_folder(folder, config, tiny_weights(config) if weights is None else weights)
    write_tokenizer(folder, adds_bos)
    return folder


def write_shards(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], count: int) -> list[Path]:
    """config.json and `count` shards with their index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config.raw)))
    names = list(weights)
    places: dict[str, str] = {}
    for i in range(count):
        shard = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: weights[name] for name in names[i::count]}
        save_file(part, folder / shard, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, shard))
    write_index(folder, places)
    return sorted(folder.glob("*.safetensors"))


def write_index(folder: Path, places: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": dict(places)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, adds_bos: bool = False) -> None:
    """Byte-level BPE of 300 ids: bytes, 41 merges (he + llo = hello), BOS, EOS (the pad as well), <|user|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("ll", "o"),
        ("he", "llo"),
        *((a, "z") for a in "abcdefghijklmnopqrstuvwxyABCDEFGHIJKL"),
    ]
    pieces = [*alphabet, *(a + b for a, b in merges)]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<bos>", "<eos>", "<|user|>")])
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    inner.save(str(folder / "tokenizer.json"))
    about = {"bos_token": "<bos>", "chat_template": TEMPLATE, "eos_token": "<eos>", "pad_token": "<eos>"}
    about["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def bits(tensor: Tensor) -> list[int]:
    """The integers behind a tensor's values: what equality means here."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten().tolist()
