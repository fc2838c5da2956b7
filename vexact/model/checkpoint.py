"""Weights in Hugging Face folders: read strictly, written whole or not at all.

One rule for dtypes. Loading never rounds: every tensor keeps the value it is stored with. Where the tensors of a
folder have different dtypes, all are widened to float32, which is exact. A policy rounds each weight once, to the dtype
it computes in; told that dtype, loading refuses a value too large for it and counts what the 16-bit tensors will lose.
What was found is reported in one line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vexact.model.config import DTYPES, ModelConfig, read_json
from vexact.model.shards import SINGLE, CheckpointError, check, inventory, read

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tables that old files carry as tensors. They follow from config.json, so the file's copies are not read.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
INTEGERS = {2: torch.int16, 4: torch.int32}


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every parameter, in the order of the forward."""
    width, feed = config.hidden_size, config.intermediate_size
    rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    table: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width)}
    for i in range(config.num_layers):
        layer, attention, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        table[f"{layer}.input_layernorm.weight"] = (width,)
        for part, heads in rows.items():
            table[f"{attention}.{part}_proj.weight"] = (heads * config.head_dim, width)
            if config.qkv_bias:
                table[f"{attention}.{part}_proj.bias"] = (heads * config.head_dim,)
            if config.qk_norm and part != "v":
                table[f"{attention}.{part}_norm.weight"] = (config.head_dim,)
        table[f"{attention}.o_proj.weight"] = (width, config.num_heads * config.head_dim)
        table[f"{layer}.post_attention_layernorm.weight"] = (width,)
        table[f"{mlp}.gate_proj.weight"] = table[f"{mlp}.up_proj.weight"] = (feed, width)
        table[f"{mlp}.down_proj.weight"] = (width, feed)
    table["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        table[HEAD] = (config.vocab_size, width)
    return table


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    say: Callable[[str], None] = to_stderr,
) -> dict[str, Tensor]:
    """The parameters of `config` under their Hugging Face names, all of one dtype, mapped from their files.

    dtype: what the policy will compute in, to be checked and reported; nothing is rounded here. Raises CheckpointError
    where a tensor is missing, cut short, unknown, of another shape or dtype, not finite, or too large for `dtype`, or
    where a tied model carries a head of its own. A head that equals the embedding is dropped.
    """
    stored = {name: found for name, found in inventory(Path(folder)).items() if not IGNORED.fullmatch(name)}
    expected = shapes(config)
    tied_head = config.tie_word_embeddings and HEAD in stored
    check(Path(folder), stored, {**expected, HEAD: expected[EMBEDDING]} if tied_head else expected)
    tensors = read(stored)
    if tied_head and not _same_values(tensors.pop(HEAD), tensors[EMBEDDING]):
        raise CheckpointError(f"{stored[HEAD].file}: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true")
    changed = sum(_changes(stored[name].file, name, tensor, dtype) for name, tensor in tensors.items())
    dtypes = Counter(_name(tensor.dtype) for tensor in tensors.values())
    say(f"{folder}: {_report(dtypes, config, changed, dtype)}")
    return {name: tensors[name].float() if len(dtypes) > 1 else tensors[name] for name in expected}


def save_folder(
    folder: str | Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer_source: str | Path | None = None
) -> None:
    """Write config.json, generation_config.json, model.safetensors, and the tokenizer's files out of a folder.

    The folder appears whole or not at all; one that exists and is not empty is refused. weights: every parameter of
    `config`, all of one dtype, which config.json then names. Raises CheckpointError.
    """
    expected = shapes(config)
    for name in {**expected, **weights}:
        if name not in weights or name not in expected:
            raise CheckpointError(f"{folder}: {name} is {'missing' if name in expected else 'not a parameter'}")
        if tuple(weights[name].shape) != expected[name]:
            raise CheckpointError(f"{folder}: {name} has shape {list(weights[name].shape)}, not {list(expected[name])}")
    dtypes = sorted({_name(tensor.dtype) for tensor in weights.values()})
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        raise CheckpointError(
            f"{folder}: weights of one dtype of {', '.join(DTYPES)} are saved, not {', '.join(dtypes)}"
        )
    raw = {key: value for key, value in config.raw.items() if key not in ("dtype", "torch_dtype")}
    raw["torch_dtype" if "torch_dtype" in config.raw else "dtype"] = dtypes[0]
    source = None if tokenizer_source is None else Path(tokenizer_source)
    generation: dict[str, Any] = {}
    if source is not None and (source / "generation_config.json").is_file():
        generation = read_json(source / "generation_config.json")
    with new_folder(folder) as draft:
        write_weights(draft / SINGLE, {name: weights[name] for name in expected})
        write_json(draft / "config.json", raw)
        write_json(draft / "generation_config.json", {**generation, "eos_token_id": list(config.eos_token_ids)})
        for name in TOKENIZER_FILES:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, draft / name)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, names ascending: equal only for weights equal in every bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, _name(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A sibling to write files into, which takes the name `folder` once it is whole and on the disk."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.iterdir(), draft]:
            flush(path)
        _rename(draft, folder)
        flush(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _rename(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError as error:  # someone else made the folder meanwhile
        raise CheckpointError(f"{folder}: {error.strerror}") from None


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """One safetensors file, readable by whoever may read a new file here (the library makes it private)."""
    path.touch()
    mode = path.stat().st_mode
    on_host = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(on_host, path, metadata={"format": "pt"})
    path.chmod(mode)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def flush(path: Path) -> None:
    """Onto the disk: a file's bytes, a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_values(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    integer = INTEGERS[a.element_size()]
    return bool(torch.equal(a.view(integer), b.view(integer)))


def _changes(file: Path, name: str, tensor: Tensor, dtype: torch.dtype | None) -> int:
    """How many values of a 16-bit tensor rounding to `dtype` will change; those of float32 are not counted."""
    low, high = torch.aminmax(tensor)
    if not (low.isfinite() and high.isfinite()):
        raise CheckpointError(f"{file}: {name} holds a value that is not finite")
    if dtype is None:
        return 0
    largest = torch.maximum(-low, high)
    if not largest.to(dtype).isfinite():
        raise CheckpointError(f"{file}: {name} holds {largest.item():.6g}, too large for {_name(dtype)}")
    if dtype in (torch.float32, tensor.dtype) or tensor.dtype == torch.float32:
        return 0
    return int((tensor.to(dtype).float() != tensor.float()).sum())


def _report(dtypes: Counter[str], config: ModelConfig, changed: int, dtype: torch.dtype | None) -> str:
    parts = [", ".join(f"{count} tensors of {name}" for name, count in dtypes.most_common())]
    if len(dtypes) > 1:
        parts.append("all widened to float32")
    if dtypes.keys() != {_name(config.dtype)}:
        parts.append(f"config.json names {_name(config.dtype)}")
    if dtype is not None and dtypes.keys() != {_name(dtype)}:
        lost = f", which changes {changed} values of 16 bits" if changed else ""
        parts.append(f"computed in {_name(dtype)}{lost}")
    return "; ".join(parts)
