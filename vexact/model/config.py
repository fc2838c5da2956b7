"""What a checkpoint's config.json says about the model, read strictly.

A key that changes what the model computes is understood or refused by name. A key that changes nothing is listed here.
A key that is not known at all is refused too: an engine that promises every bit cannot guess.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vexact.errors import BadInput

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
MAX_GROUP = 8  # query heads of one key/value head
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Keys that are accepted with these values only, because any other value changes the function.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "is_llama_config": (True,),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "use_mrope": (False,),
    "use_sliding_window": (False, None),
}
# Keys that never change what the model computes (the windows only where use_sliding_window, above, is off).
HARMLESS = frozenset((
    "bos_token_id", "chunk_size_feed_forward", "id2label", "initializer_range", "is_decoder", "label2id",
    "max_window_layers", "output_attentions", "output_hidden_states", "problem_type", "return_dict", "sliding_window",
    "tokenizer_class", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_cache", "use_return_dict",
))  # fmt: skip
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DEFAULT_THETA = 10000.0  # of a file that names no rope at all, as Llama's first ones do not


class ConfigError(BadInput):
    """A config.json that this engine does not compute exactly. One line: file, key, value."""


@dataclass(frozen=True)
class Llama3Scaling:
    """The stretching of low frequencies that Llama 3.1 brought. Lengths are in positions."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: frequency i of a head of size K is theta^(-2i/K), then scaled."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. Letters as in the README: V, D, F, L, H, G, K."""

    family: str  # "llama", "qwen2", "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: torch.dtype  # what config.json names, float32 where it names none
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    raw: Mapping[str, Any] = field(repr=False, hash=False)  # config.json as it was read, for saving

    @property
    def attention_scale(self) -> float:
        """1/sqrt(K)."""
        return 1.0 / math.sqrt(self.head_dim)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json, and the end ids of generation_config.json where there is one. Raises ConfigError."""
        path, generation = Path(folder) / "config.json", Path(folder) / "generation_config.json"
        extra = read_json(generation).get("eos_token_id") if generation.is_file() else None
        return cls.from_dict(read_json(path), source=str(path), generation_eos=extra)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config", generation_eos: Any = None) -> ModelConfig:
        """`source` names the file in errors; `generation_eos` (int, list or None) is united with the config's own."""
        keys = _Keys(raw, source)
        family = _family(keys)
        _refuse_other_values(keys)
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        vocab, layers = keys.size("vocab_size"), keys.size("num_hidden_layers")
        _refuse_windows(keys, layers)
        config = cls(
            family=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=keys.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(keys, heads),
            head_dim=_head_dim(keys, hidden, heads),
            rms_norm_eps=keys.positive("rms_norm_eps"),
            rope=_rope(keys),
            max_positions=keys.size("max_position_embeddings"),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            dtype=_dtype(keys),
            eos_token_ids=_eos(keys, generation_eos, vocab),
            pad_token_id=keys.get("pad_token_id"),
            raw=dict(raw),
        )
        _refuse_unknown(keys)
        return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is not a JSON object")
    return content


class _Keys:
    """The keys of one JSON object, with errors that name file, key and value."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source
        self.understood: set[str] = set()

    def error(self, key: str, what: str) -> ConfigError:
        value = json.dumps(self.raw[key], default=str) if key in self.raw else "absent"
        return ConfigError(f"{self.source}: {key} = {value} {what}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, with null and absent alike. A key that was asked for counts as understood."""
        self.understood.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "is not a positive integer")
        return value

    def positive(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "is not a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false")
        return value


def _family(keys: _Keys) -> str:
    family = keys.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise keys.error("model_type", f"is not supported; supported: {', '.join(ARCHITECTURES)}")
    if keys.get("architectures", [ARCHITECTURES[family]]) != [ARCHITECTURES[family]]:
        raise keys.error("architectures", f"is not supported; of model_type {family}: {ARCHITECTURES[family]}")
    return family


def _refuse_other_values(keys: _Keys) -> None:
    for key, accepted in NEUTRAL.items():
        # True == 1 in Python, but not in a config.
        value = keys.raw.get(key, accepted[0])
        if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in accepted):
            raise keys.error(key, "is not supported")


def _refuse_unknown(keys: _Keys) -> None:
    for key in keys.raw:
        if key not in keys.understood and key not in NEUTRAL and key not in HARMLESS and not key.startswith("_"):
            raise keys.error(key, "is unknown; if it does not change what the model computes, take it out of the file")


def _refuse_windows(keys: _Keys, layers: int) -> None:
    kinds = keys.get("layer_types", ["full_attention"] * layers)
    if kinds != ["full_attention"] * layers:
        raise keys.error("layer_types", f"is not supported; only full_attention in each of {layers} layers is")
    if "use_sliding_window" not in keys.raw and keys.get("sliding_window") is not None:
        raise keys.error("sliding_window", "is not supported")


def _kv_heads(keys: _Keys, heads: int) -> int:
    kv_heads = heads if keys.get("num_key_value_heads") is None else keys.size("num_key_value_heads")
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"does not divide num_attention_heads = {heads}")
    if heads // kv_heads > MAX_GROUP:
        raise keys.error("num_key_value_heads", f"is not supported: more than {MAX_GROUP} query heads share one")
    return kv_heads


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    if keys.get("head_dim") is None:
        if hidden % heads:
            raise keys.error("num_attention_heads", f"does not divide hidden_size = {hidden} and head_dim is not given")
        head_dim = hidden // heads
    else:
        head_dim = keys.size("head_dim")
    if head_dim not in HEAD_DIMS:
        raise ConfigError(f"{keys.source}: head_dim = {head_dim} is not supported; supported: {HEAD_DIMS}")
    return head_dim


def _dtype(keys: _Keys) -> torch.dtype:
    named = [key for key in ("dtype", "torch_dtype") if keys.get(key) is not None]
    for key in named:
        if str(keys.raw[key]).removeprefix("torch.") not in DTYPES:
            raise keys.error(key, f"is not supported; supported: {', '.join(DTYPES)}")
    found = {DTYPES[str(keys.raw[key]).removeprefix("torch.")] for key in named}
    if len(found) > 1:
        raise keys.error("dtype", f"contradicts torch_dtype = {keys.raw['torch_dtype']}")
    return found.pop() if found else torch.float32


def _eos(keys: _Keys, generation_eos: Any, vocab: int) -> tuple[int, ...]:
    ids: list[int] = []
    for value in (keys.get("eos_token_id", []), [] if generation_eos is None else generation_eos):
        for token in value if isinstance(value, list) else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise ConfigError(f"{keys.source}: eos_token_id = {token!r} is not an id below vocab_size = {vocab}")
            if token not in ids:
                ids.append(token)
    return tuple(ids)


def _rope(keys: _Keys) -> RopeConfig:
    """Three spellings: rope_scaling with `type`, with `rope_type`, and rope_parameters, which holds theta as well."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        table = keys.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise keys.error(key, "is not an object")
        inner = _Keys(table, f"{keys.source}: {key}")
        found.append(RopeConfig(_theta(keys, inner), _scaling(inner)))
    if len(found) == 2 and found[0] != found[1]:
        raise keys.error("rope_scaling", "contradicts rope_parameters")
    if found:
        return found[0]
    return RopeConfig(_theta(keys, _Keys({"rope_theta": keys.get("rope_theta", DEFAULT_THETA)}, keys.source)))


def _theta(outer: _Keys, inner: _Keys) -> float:
    outside, inside = outer.get("rope_theta"), inner.get("rope_theta")
    if outside is not None and inside is not None and outside != inside:
        raise inner.error("rope_theta", f"contradicts rope_theta = {outside} outside")
    theta = (inner if inside is not None else outer).positive("rope_theta")
    if theta < 1:
        raise (inner if inside is not None else outer).error("rope_theta", "is below 1")
    return theta


def _scaling(keys: _Keys) -> Llama3Scaling | None:
    kinds = {keys.raw[key] for key in ("rope_type", "type") if keys.get(key) is not None}
    if len(kinds) > 1:
        raise keys.error("rope_type", f"contradicts type = {json.dumps(keys.raw['type'])}")
    kind = kinds.pop() if kinds else None
    if kind not in ("default", "llama3"):
        key = "type" if keys.get("rope_type") is None and "type" in keys.raw else "rope_type"
        raise keys.error(key, "is not supported; supported: default, llama3")
    allowed = {"rope_type", "type", "rope_theta", *(LLAMA3_KEYS if kind == "llama3" else ())}
    for key, value in keys.raw.items():
        if key not in allowed and not (key == "partial_rotary_factor" and value in (1, None)):
            raise keys.error(key, f"is not supported with rope type {kind}")
    if kind == "default":
        return None
    factor, low, high = (keys.positive(key) for key in LLAMA3_KEYS[:3])
    if not low < high:
        raise keys.error("high_freq_factor", f"is not above low_freq_factor = {low}")
    if factor < 1:
        raise keys.error("factor", "is below 1")
    return Llama3Scaling(factor, low, high, keys.size(LLAMA3_KEYS[3]))
