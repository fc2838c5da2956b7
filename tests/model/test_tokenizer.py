"""Where BOS goes, and what unknown ids become."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import BOS, EOS, SIZE, build, l3, q3
from vexact.model.checkpoint import save_folder
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.model.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    FolderTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)

USER = 299


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(build(tmp_path_factory.mktemp("llama") / "l3", l3(), adds_bos=True))


@pytest.fixture(scope="module")
def without_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(build(tmp_path_factory.mktemp("qwen") / "q3", q3()))


def test_raw_text_gets_what_the_post_processor_adds(with_bos: Tokenizer, without_bos: Tokenizer) -> None:
    assert with_bos.encode("hello")[0] == BOS
    assert len(with_bos.encode("hello")) == 2
    assert with_bos.encode("") == [BOS]
    assert without_bos.encode("hello") == with_bos.encode("hello")[1:]


def test_a_chat_prompt_has_one_bos(with_bos: Tokenizer, without_bos: Tokenizer) -> None:
    ids = with_bos.encode("hello", chat=True)
    assert ids[:2] == [BOS, USER]
    assert ids.count(BOS) == 1
    assert without_bos.encode("hello", chat=True) == ids


def test_text_that_went_through_a_template_gets_no_second_bos(with_bos: Tokenizer) -> None:
    assert with_bos.encode("<bos><|user|>hello") == with_bos.encode("hello", chat=True)


def test_ids_beyond_the_vocabulary_decode_to_nothing(without_bos: Tokenizer) -> None:
    assert without_bos.size == SIZE
    ids = without_bos.encode("hello")
    assert without_bos.decode([300, *ids, 319, -1]) == "hello"


def test_special_ids_decode_to_nothing(with_bos: Tokenizer) -> None:
    assert with_bos.decode([BOS, *with_bos.encode("a  ,b")[1:], EOS]) == "a  ,b"


def test_two_pieces_and_one_are_the_same_text_but_not_the_same_ids(without_bos: Tokenizer) -> None:
    pieces = [*without_bos.encode("he"), *without_bos.encode("llo")]
    assert without_bos.decode(pieces) == "hello"
    assert without_bos.encode(without_bos.decode(pieces)) != pieces


def test_bytes_go_round() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve 世界\n")
    assert ids[0] == tokenizer.bos
    assert tokenizer.decode([*ids, tokenizer.eos, 300, 319, -1]) == "naïve 世界\n"
    assert tokenizer.decode([0xE4, 0xB8]) == "�"


def test_tiny_and_what_is_saved_from_it_read_bytes(tmp_path: Path) -> None:
    config = tiny_config()
    save_folder(tmp_path / "saved", config, tiny_weights(config))
    assert isinstance(load_tokenizer("tiny"), ByteTokenizer)
    assert isinstance(load_tokenizer(tmp_path / "saved"), ByteTokenizer)
    with pytest.raises(TokenizerError, match="no chat template"):
        load_tokenizer("tiny").encode("a", chat=True)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=f"{tmp_path}: has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer.json cannot be loaded"):
        FolderTokenizer(tmp_path)


def test_what_goes_on_gets_nothing_in_front(with_bos: Tokenizer) -> None:
    for tokenizer in (with_bos, load_tokenizer("tiny"), load_tokenizer("tiny-modsum")):
        assert [*tokenizer.encode("1"), *tokenizer.continuation("+2")] == tokenizer.encode("1+2")
        assert len(tokenizer.encode("1")) == 2


def test_a_character_tokenizer_knows_each_character_once() -> None:
    tokenizer = CharacterTokenizer("ab\n")
    assert tokenizer.encode("b\na") == [3, 1, 2, 0]
    assert tokenizer.decode([3, 1, 2, 0, 4, 5, 6, -1]) == "b\na"
    assert (tokenizer.size, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (6, 3, 4, 5)
    with pytest.raises(TokenizerError, match="names one twice"):
        CharacterTokenizer("aba")
    with pytest.raises(TokenizerError, match="reads 'ab\\\\n' and no 'c'"):
        tokenizer.encode("abc")
