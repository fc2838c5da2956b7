"""Folders are read strictly and written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import FAMILIES, bits, build, q2, q3, write_index, write_shards
from vexact.model.checkpoint import fingerprint, load_weights, new_folder, save_folder, shapes
from vexact.model.config import ModelConfig
from vexact.model.shards import CheckpointError
from vexact.model.tiny import tiny_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, Tensor]


def silent(_: str) -> None:
    pass


def write(folder: Path, config: ModelConfig, weights: Weights) -> Path:
    """A folder of one file, without any of save_folder's checks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config.raw)))
    save_file(weights, folder / "model.safetensors")
    return folder


def refusal(folder: Path, config: ModelConfig, dtype: torch.dtype | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_weights(folder, config, dtype, say=silent)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_load_save_load_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    weights = tiny_weights(config)
    build(tmp_path / "one", config, weights)
    first = load_weights(tmp_path / "one", ModelConfig.from_folder(tmp_path / "one"), say=silent)
    save_folder(tmp_path / "two", config, first, tokenizer_source=tmp_path / "one")
    again = ModelConfig.from_folder(tmp_path / "two")
    second = load_weights(tmp_path / "two", again, say=silent)
    assert list(first) == list(second) == list(shapes(config))
    assert all(bits(weights[name]) == bits(first[name]) == bits(second[name]) for name in weights)
    assert fingerprint(weights) == fingerprint(second)
    assert again.raw == config.raw
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_and_shapes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family]()
    folder = build(tmp_path / "model", config)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert {name: tuple(value.shape) for name, value in theirs.named_parameters()} == shapes(config)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_weights(tmp_path / "theirs", ModelConfig.from_folder(tmp_path / "theirs"), say=silent)
    assert fingerprint(ours) == fingerprint(tiny_weights(config))


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    config, weights = q3(), tiny_weights(q3())
    write_shards(tmp_path / "three", config, weights, 3)
    assert fingerprint(load_weights(tmp_path / "three", config, say=silent)) == fingerprint(weights)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "three", q3(), tiny_weights(q3()), 3)
    shards[0].unlink()
    assert refusal(tmp_path / "three", q3()) == (
        f"{shards[0]}: no such file, though model.safetensors.index.json places {EMBEDDING} there"
    )


@pytest.mark.parametrize("cut", [1, 100])
def test_a_shard_that_is_cut_short_is_named_with_its_tensor(cut: int, tmp_path: Path) -> None:
    shard = write_shards(tmp_path / "three", q3(), tiny_weights(q3()), 3)[1]
    shard.write_bytes(shard.read_bytes()[:-cut])
    assert refusal(tmp_path / "three", q3()).startswith(f"{shard}: is cut short inside model.layers.")


@pytest.mark.parametrize("left", [0, 7, 8, 100])
def test_a_file_cut_inside_its_header_is_named(left: int, tmp_path: Path) -> None:
    file = build(tmp_path / "q3", q3()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert refusal(file.parent, q3()) == f"{file}: is cut short inside its header"


def test_a_corrupt_header_is_named(tmp_path: Path) -> None:
    file = build(tmp_path / "q3", q3()) / "model.safetensors"
    for harm in (b"\x08" + bytes(7) + b"not json", b"\x02" + bytes(7) + b"[]", b"\x0a" + bytes(7) + b'{"a": 123}'):
        file.write_bytes(harm)
        assert refusal(file.parent, q3()) == f"{file}: its header is not one of safetensors"


def test_a_tensor_whose_bytes_do_not_fill_its_shape_is_named(tmp_path: Path) -> None:
    file = build(tmp_path / "q3", q3()) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[320,64]', b'"shape":[321,64]'))
    assert refusal(file.parent, q3()) == f"{file}: {EMBEDDING} has 40960 bytes, not the 41088 of its shape"


def test_bytes_that_belong_to_no_tensor_are_refused(tmp_path: Path) -> None:
    file = build(tmp_path / "q3", q3()) / "model.safetensors"
    file.write_bytes(file.read_bytes() + bytes(100))
    assert refusal(file.parent, q3()).startswith(f"{file}: ")


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    folder = tmp_path / "three"
    shards = write_shards(folder, q3(), tiny_weights(q3()), 3)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    write_index(folder, {**places, "model.extra": shards[2].name})
    lacks = f"{shards[2]}: lacks model.extra, which model.safetensors.index.json places there"
    assert refusal(folder, q3()) == lacks
    write_index(folder, {name: place for name, place in places.items() if name != Q_PROJ})
    assert f"holds {Q_PROJ}, which model.safetensors.index.json does not place there" in refusal(folder, q3())
    write_index(folder, {**places, Q_PROJ: "../elsewhere.safetensors"})
    assert refusal(folder, q3()) == f"{index}: ../elsewhere.safetensors is not a plain file name"
    index.write_text('{"weight_map": 3}')
    assert refusal(folder, q3()) == f"{index}: weight_map is not an object of file names"


def test_one_file_beside_an_index_is_ambiguous_and_neither_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "both", q3(), tiny_weights(q3()), 2)
    write(tmp_path / "both", q3(), tiny_weights(q3()))
    assert "has both model.safetensors and model.safetensors.index.json" in refusal(tmp_path / "both", q3())
    (tmp_path / "none").mkdir()
    assert "has neither" in refusal(tmp_path / "none", q3())


def without(weights: Weights, name: str) -> Weights:
    return {key: value for key, value in weights.items() if key != name}


BIAS = "model.layers.1.self_attn.k_proj.bias"
HARMS: list[tuple[Callable[[Weights], Weights], str]] = [
    (lambda w: without(w, BIAS), f"{BIAS} is missing"),
    (lambda w: without(without(w, HEAD), BIAS), f"{BIAS} is missing (and 1 more)"),
    (
        lambda w: {**w, "model.layers.2.mlp.up_proj.weight": w[HEAD].clone()},
        "model.layers.2.mlp.up_proj.weight is not a",
    ),
    (
        lambda w: {**w, "model.layers.0.self_attn.o_proj.bias": w[BIAS].clone()},
        "model.layers.0.self_attn.o_proj.bias is not a",
    ),
    (lambda w: {**w, BIAS: w[BIAS][:-1].clone()}, f"{BIAS} has shape [15], not [16]"),
    (lambda w: {**w, HEAD: w[HEAD].T.contiguous()}, f"{HEAD} has shape [112, 1000], not [1000, 112]"),
    (lambda w: {**w, BIAS: w[BIAS].double()}, f"{BIAS} is stored as F64; supported: F32, BF16, F16"),
    (lambda w: {**w, BIAS: w[BIAS].fill_(float("inf"))}, f"{BIAS} holds a value that is not finite"),
    (lambda w: {**w, BIAS: w[BIAS].fill_(float("nan"))}, f"{BIAS} holds a value that is not finite"),
]


@pytest.mark.parametrize(("harm", "words"), HARMS, ids=[words for _, words in HARMS])
def test_tensors_that_are_not_the_models_are_named(
    harm: Callable[[Weights], Weights], words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "q2", q2(), harm(tiny_weights(q2())))
    line = refusal(folder, q2())
    assert words in line
    assert line.startswith(str(folder))


def test_rotary_tables_of_old_files_are_not_read(tmp_path: Path) -> None:
    weights = tiny_weights(q3())
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16), "model.rotary_emb.inv_freq": torch.ones(16)}
    folder = write(tmp_path / "q3", q3(), {**weights, **old})
    assert fingerprint(load_weights(folder, q3(), say=silent)) == fingerprint(weights)


def test_a_tied_head_is_dropped_where_it_is_equal_and_refused_where_it_differs(tmp_path: Path) -> None:
    weights = tiny_weights(q3())
    for i, head in enumerate((weights[EMBEDDING].clone(), weights[EMBEDDING].float())):
        folder = write(tmp_path / str(i), q3(), {**weights, HEAD: head})
        assert fingerprint(load_weights(folder, q3(), say=silent)) == fingerprint(weights)
    other = weights[EMBEDDING].clone()
    other[319, 63] = torch.nextafter(other[319, 63], torch.tensor(9.0, dtype=torch.bfloat16))
    folder = write(tmp_path / "other", q3(), {**weights, HEAD: other})
    assert refusal(folder, q3()) == (
        f"{folder}/model.safetensors: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true"
    )


def test_a_zero_of_the_other_sign_is_another_head(tmp_path: Path) -> None:
    weights = tiny_weights(q3())
    weights[EMBEDDING][0, 0] = 0.0
    head = weights[EMBEDDING].clone()
    head[0, 0] = -0.0
    assert "differs" in refusal(write(tmp_path / "q3", q3(), {**weights, HEAD: head}), q3())


def test_mixed_dtypes_are_widened_and_reported(tmp_path: Path) -> None:
    weights = tiny_weights(q3())
    mixed = {name: value.float() if "norm" in name else value for name, value in weights.items()}
    mixed[Q_PROJ] = mixed[Q_PROJ].half()
    lines: list[str] = []
    loaded = load_weights(write(tmp_path / "q3", q3(), mixed), q3(), say=lines.append)
    assert all(bits(loaded[name]) == bits(mixed[name].float()) for name in weights)
    expected = "14 tensors of bfloat16, 9 tensors of float32, 1 tensors of float16; all widened to float32"
    assert lines == [f"{tmp_path / 'q3'}: {expected}; config.json names bfloat16"]


def test_a_config_that_names_another_dtype_is_reported_and_rounds_nothing(tmp_path: Path) -> None:
    config, weights = q3(dtype="float32"), tiny_weights(q3())
    lines: list[str] = []
    loaded = load_weights(write(tmp_path / "q3", config, weights), config, say=lines.append)
    assert fingerprint(loaded) == fingerprint(weights)
    assert lines[0].endswith("24 tensors of bfloat16; config.json names float32")


def test_a_loss_of_digits_is_counted(tmp_path: Path) -> None:
    config = q3(dtype="float16")
    weights = {name: torch.ones_like(value) for name, value in tiny_weights(config).items()}
    weights[Q_PROJ][0, :3] = 1 + 2.0**-10  # a float16, not a bfloat16
    folder = write(tmp_path / "q3", config, weights)
    for dtype, count in ((torch.bfloat16, 3), (torch.float32, 0), (torch.float16, 0)):
        lines: list[str] = []
        assert fingerprint(load_weights(folder, config, dtype, say=lines.append)) == fingerprint(weights)
        lost = f", which changes {count} values of 16 bits" if count else ""
        note = f"; computed in {str(dtype)[6:]}{lost}" if dtype != torch.float16 else ""
        assert lines == [f"{folder}: 24 tensors of float16{note}"]


def test_a_value_too_large_for_the_compute_dtype_is_refused(tmp_path: Path) -> None:
    weights = tiny_weights(q3())
    weights[Q_PROJ][5, 5] = 65536.0
    folder = write(tmp_path / "q3", q3(), weights)
    load_weights(folder, q3(), torch.bfloat16, say=silent)
    line = f"{folder}/model.safetensors: {Q_PROJ} holds 65536, too large for float16"
    assert refusal(folder, q3(), torch.float16) == line


def test_saving_names_what_does_not_fit(tmp_path: Path) -> None:
    weights = tiny_weights(q3())
    harms = {
        f"{Q_PROJ} is missing": without(weights, Q_PROJ),
        f"{HEAD} is not a parameter": {**weights, HEAD: weights[EMBEDDING]},
        f"{Q_PROJ} has shape [64, 128], not [128, 64]": {**weights, Q_PROJ: weights[Q_PROJ].T},
        "not bfloat16, float32": {**weights, Q_PROJ: weights[Q_PROJ].float()},
    }
    for words, harmed in harms.items():
        with pytest.raises(CheckpointError) as refused:
            save_folder(tmp_path / "q3", q3(), harmed)
        assert str(refused.value).startswith(f"{tmp_path / 'q3'}: ")
        assert words in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_saving_keeps_the_other_settings_of_generation(tmp_path: Path) -> None:
    folder = build(tmp_path / "one", q3())
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    config = ModelConfig.from_folder(folder)
    save_folder(tmp_path / "two", config, tiny_weights(config), tokenizer_source=folder)
    saved = json.loads((tmp_path / "two" / "generation_config.json").read_text())
    assert saved == {"eos_token_id": [298, 1], "temperature": 0.6}
    assert ModelConfig.from_folder(tmp_path / "two").eos_token_ids == config.eos_token_ids


def test_views_of_one_stack_are_saved(tmp_path: Path) -> None:
    weights = tiny_weights(q3())
    parts = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    stack = torch.cat([weights[name] for name in parts])
    views = {**weights, **dict(zip(parts, stack.split(160), strict=True))}
    save_folder(tmp_path / "q3", q3(), views)
    assert fingerprint(load_file(tmp_path / "q3" / "model.safetensors")) == fingerprint(weights)


def test_the_saved_config_names_the_dtype_that_was_saved(tmp_path: Path) -> None:
    config = q3()
    save_folder(tmp_path / "q3", config, {name: value.float() for name, value in tiny_weights(config).items()})
    assert ModelConfig.from_folder(tmp_path / "q3").dtype == torch.float32


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        with new_folder(folder) as draft:
            (draft / "half").write_text("x")
            assert not folder.exists()
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    with new_folder(tmp_path / "model") as draft:
        (draft / "whole").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(CheckpointError, match="model: exists already"):
        fail(tmp_path / "model")


def test_a_fingerprint_sees_every_bit_name_shape_and_dtype() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    base = fingerprint(weights)
    assert base == fingerprint({"b": torch.ones(4), "a": torch.zeros(3, 2).T})
    negative = weights["a"].clone()
    negative[1, 2] = -0.0
    others = [
        {**weights, "a": negative},
        {**weights, "a": torch.zeros(3, 2)},
        {**weights, "a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": weights["a"], "c": weights["b"]},
        {"a": weights["a"]},
    ]
    assert len({base, *map(fingerprint, others)}) == 6
