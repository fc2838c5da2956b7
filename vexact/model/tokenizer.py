"""Text to ids and back.

Where a beginning-of-sequence id goes. Raw text gets what the tokenizer's own post-processor adds. A chat prompt is
written by the tokenizer's template and gets nothing else. Raw text that begins with the BOS token's own spelling has
been through a template already: nothing is added to it either. Ids are never decoded and encoded again by this engine,
so what a sampler drew is what is scored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vexact.errors import BadInput
from vexact.model.config import read_json

# A key of config.json of models without tokenizer files: "bytes", or "characters:" and the characters that they read.
BYTES_KEY = "_vexact_tokenizer"
CHARACTERS = "characters:"
NUMERALS = "0123456789abcdefghijklmn"  # of modsum: a sign for each residue
TINY = {"tiny": "bytes", "tiny-modsum": f"{CHARACTERS}{NUMERALS}+=,\n"}  # the small models that need no files
Message = Mapping[str, str]  # role and content
RESERVED = ("tokenize", "add_generation_prompt", "continue_final_message")  # of a template: the engine sets these


class TokenizerError(BadInput):
    """A folder without a usable tokenizer. One line that names it."""


class Tokenizer(Protocol):
    """What the sampler, the tasks and the command line need of a tokenizer."""

    size: int  # ids 0 … size - 1 are known; a model's vocabulary may be padded beyond

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Ids of raw text or, with `chat`, of the template's prompt for one message of a user."""
        ...

    def continuation(self, text: str) -> list[int]:
        """Ids of text that goes on behind a prompt, as a solution to learn from: nothing is added to it."""
        ...

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Ids of the prompt that the tokenizer's template makes of a chat.

        A last message of the assistant is gone on with; behind any other the template begins the assistant's.
        options: variables of the template, as enable_thinking. Raises TokenizerError for one that it does not read.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens and ids that are not known give the empty string."""
        ...


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or the one of `tiny`, `tiny-modsum` and models saved from them."""
    named = TINY.get(str(folder)) or _named(Path(folder))
    if named is None:
        return FolderTokenizer(Path(folder))
    return ByteTokenizer() if named == "bytes" else CharacterTokenizer(named.removeprefix(CHARACTERS))


def prompt_ids(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of a prompt: text as it stands, messages through the template with its options."""
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt, options or {})


def _named(folder: Path) -> str | None:
    config = folder / "config.json"
    named = read_json(config).get(BYTES_KEY) if config.is_file() else None
    return named if named == "bytes" or str(named).startswith(CHARACTERS) else None


class FolderTokenizer:
    """The tokenizer.json of a folder, exactly as it is written there."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(f"{folder}: has no tokenizer.json")
        try:
            # Not AutoTokenizer: for some models it rebuilds the splitting rules from the vocabulary alone.
            self._inner: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the library raises bare Exceptions on broken files
            raise TokenizerError(f"{folder}: tokenizer.json cannot be loaded ({error})") from None
        self._folder = folder
        self.size: int = len(self._inner)

    def encode(self, text: str, chat: bool = False) -> list[int]:
        if chat:
            return self.chat([{"role": "user", "content": text}], {})
        bos = self._inner.bos_token
        whole = bos is not None and text.startswith(bos)
        return list(self._inner.encode(text, add_special_tokens=not whole))

    def continuation(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False))

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        return list(self._inner.encode(self._templated(messages, options), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self.size]
        return str(self._inner.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _templated(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        template = self._inner.chat_template
        if not template:
            raise TokenizerError(f"{self._folder}: the tokenizer has no chat template")
        for name in options:
            if name in RESERVED:
                raise TokenizerError(f"{self._folder}: option {name} of the chat template is set by the engine")
            if not re.search(rf"\b{re.escape(name)}\b", str(template)):
                raise TokenizerError(f"{self._folder}: the chat template does not read the option {name}")
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                **options,
            )
        except Exception as error:  # a template raises what it likes
            said = " ".join(str(error).split())
            raise TokenizerError(f"{self._folder}: the chat template refuses the messages ({said})") from error
        return str(text)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 … 255, and three special ids. Text begins with BOS."""

    bos, eos, pad = 256, 257, 258
    size = 259

    def encode(self, text: str, chat: bool = False) -> list[int]:
        if chat:
            return self.chat([], {})
        return [self.bos, *self.continuation(text)]

    def continuation(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        raise TokenizerError("tiny: the tokenizer of bytes has no chat template")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")


class CharacterTokenizer:
    """One id a character, in the order given, and three special ids behind them. Text begins with BOS.

    Raises TokenizerError for a character that is not among them.
    """

    def __init__(self, characters: str) -> None:
        if len(set(characters)) != len(characters):
            raise TokenizerError(f"{characters!r}: the tokenizer of characters names one twice")
        self.characters = characters
        self.bos, self.eos, self.pad = range(len(characters), len(characters) + 3)
        self.size = len(characters) + 3
        self._ids = {character: i for i, character in enumerate(characters)}

    def encode(self, text: str, chat: bool = False) -> list[int]:
        if chat:
            return self.chat([], {})
        return [self.bos, *self.continuation(text)]

    def continuation(self, text: str) -> list[int]:
        for character in text:
            if character not in self._ids:
                raise TokenizerError(f"the model reads {self.characters!r} and no {character!r}")
        return [self._ids[character] for character in text]

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        raise TokenizerError("the tokenizer of characters has no chat template")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in ids if 0 <= token < len(self.characters))
