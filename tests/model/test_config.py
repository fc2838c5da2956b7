"""config.json is understood or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from checkpoints import FAMILIES, LLAMA3, l3, q2, q3
from vexact.model.config import ConfigError, Llama3Scaling, ModelConfig, RopeConfig

SHAPE = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config again, with keys replaced, or taken out where the new value is `...`."""
    raw = {**config.raw, **changes}
    return ModelConfig.from_dict({k: v for k, v in raw.items() if v is not ...}, source="config.json")


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_what_transformers_saves_is_read(kind: type, tmp_path: Path) -> None:
    theirs = kind(**SHAPE, dtype="bfloat16", eos_token_id=5)
    theirs.save_pretrained(tmp_path)
    for config in (ModelConfig.from_folder(tmp_path), ModelConfig.from_dict(theirs.to_dict())):
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 160)
        assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
        assert config.rope == RopeConfig(10000.0)
        assert config.max_positions == theirs.max_position_embeddings
        assert config.dtype == torch.bfloat16
        assert config.eos_token_ids == (5,)
        assert not config.tie_word_embeddings
        assert (config.qkv_bias, config.qk_norm) == (kind is Qwen2Config, kind is Qwen3Config)


def test_what_hubs_hold_is_read() -> None:
    qwen3 = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    config = ModelConfig.from_dict(qwen3)
    assert (config.num_heads * config.head_dim, config.rope, config.dtype) == (2048, RopeConfig(1e6), torch.bfloat16)
    old = {"sliding_window": 131072, "max_window_layers": 21, "use_mrope": False, "use_sliding_window": False}
    assert changed(q2(), **old).family == "qwen2"
    smollm2 = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    assert changed(l3(), **smollm2, pretraining_tp=1).family == "llama"


def test_three_spellings_of_llama3_are_one() -> None:
    old = {"rope_parameters": ..., "rope_theta": 500000.0}
    expected = RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 64))
    assert l3().rope == expected
    assert changed(l3(), **old, rope_scaling={"type": "llama3", **LLAMA3}).rope == expected
    assert changed(l3(), **old, rope_scaling={"rope_type": "llama3", **LLAMA3}).rope == expected
    both = {"rope_type": "llama3", "type": "llama3", **LLAMA3}
    assert changed(l3(), rope_theta=500000.0, rope_scaling=both).rope == expected


def test_a_file_that_names_no_rope_means_what_it_meant_when_it_was_written() -> None:
    assert changed(l3(), rope_parameters=...).rope == RopeConfig(10000.0)
    assert changed(l3(), rope_parameters=..., rope_scaling=None, rope_theta=500000.0).rope == RopeConfig(500000.0)


def test_head_dim_null_is_the_quotient() -> None:
    assert changed(q3(), head_dim=None).head_dim == 16
    assert changed(q2(), head_dim=...).head_dim == 16


def test_kv_heads_null_are_as_many_as_heads() -> None:
    assert changed(l3(), num_key_value_heads=None).num_kv_heads == 4


def test_both_spellings_of_dtype_are_read() -> None:
    assert changed(q3(), dtype=..., torch_dtype="float16").dtype == torch.float16
    assert changed(q3(), dtype="torch.bfloat16").dtype == torch.bfloat16
    assert changed(q3(), dtype=...).dtype == torch.float32


def test_end_ids_are_united(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**q3().raw, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "temperature": 0.6}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 7)
    assert changed(q3(), eos_token_id=None).eos_token_ids == ()


REFUSED = [
    ({"model_type": "mistral"}, 'model_type = "mistral" is not supported'),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 'rope_type = "dynamic"'),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.0, "rope_theta": 1e4}}, '"yarn"'),
    ({"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, 'type = "linear"'),
    ({"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, 'type = "longrope"'),
    ({"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "su"}}, 'type = "su"'),
    ({"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"factor": 2.0}}, "rope_type = absent"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3, "beta": 1}}, "rope_parameters: beta = 1"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}}, "factor = 2.0"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "low_freq_factor = absent"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_theta = absent"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}}, "rope_theta = 0.5"),
    ({"rope_theta": 5e5}, "contradicts rope_theta = 500000.0"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 1e4}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "llama3", "type": "default", "rope_theta": 1e4, **LLAMA3}}, "contradicts type"),
    ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window = true"),
    ({"sliding_window": 4}, "sliding_window = 4"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"attention_bias": True}, "attention_bias = true"),
    ({"attention_bias": 0}, "attention_bias = 0"),
    ({"mlp_bias": True}, "mlp_bias = true"),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
    ({"hidden_act": None}, "hidden_act = null"),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"pretraining_tp": 2}, "pretraining_tp = 2"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ({"attention_sinks": True}, "attention_sinks = true is unknown"),
    ({"head_dim": 48}, "head_dim = 48"),
    ({"head_dim": 0}, "head_dim = 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
    ({"num_attention_heads": 9, "num_key_value_heads": 1}, "more than 8"),
    ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": None}, "does not divide hidden_size = 64"),
    ({"hidden_size": 64.0}, "hidden_size = 64.0"),
    ({"vocab_size": ...}, "vocab_size = absent"),
    ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"dtype": "float8_e4m3fn"}, 'dtype = "float8_e4m3fn"'),
    ({"torch_dtype": "float16"}, "contradicts torch_dtype"),
    ({"eos_token_id": [5, 320]}, "eos_token_id = 320 is not an id below vocab_size = 320"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(q3(), **changes)
    line = str(refused.value)
    assert words in line
    assert line.startswith("config.json: ")
    assert "\n" not in line


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_is_refused_and_a_private_one_is_kept(family: str) -> None:
    config = FAMILIES[family]()
    with pytest.raises(ConfigError, match=r"residual_multiplier = 0.5 is unknown"):
        changed(config, residual_multiplier=0.5)
    assert changed(config, _note="mine").raw["_note"] == "mine"


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match=r"config.json: cannot be read as JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config.json: is not a JSON object"):
        ModelConfig.from_folder(tmp_path)
