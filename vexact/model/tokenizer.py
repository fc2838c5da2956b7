"""Text to ids and back.

Where a beginning-of-sequence id goes. Raw text gets what the tokenizer's own post-processor adds. A chat prompt is
written by the tokenizer's template and gets nothing else. Raw text that begins with the BOS token's own spelling has
been through a template already: nothing is added to it either. Ids are never decoded and encoded again by this engine,
so what a sampler drew is what is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from vexact.errors import BadInput
from vexact.model.config import read_json

BYTES_KEY = "_vexact_tokenizer"  # a key of config.json; "bytes" where the model reads bytes and has no tokenizer files


class TokenizerError(BadInput):
    """A folder without a usable tokenizer. One line that names it."""


class Tokenizer(Protocol):
    """What the sampler, the tasks and the command line need of a tokenizer."""

    size: int  # ids 0 … size - 1 are known; a model's vocabulary may be padded beyond

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Ids of raw text or, with `chat`, of the template's prompt for one message of a user."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens and ids that are not known give the empty string."""
        ...


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or that of bytes for `tiny` and models saved from it."""
    if str(folder) == "tiny" or _reads_bytes(Path(folder)):
        return ByteTokenizer()
    return FolderTokenizer(Path(folder))


def _reads_bytes(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and read_json(config).get(BYTES_KEY) == "bytes"


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
        bos = self._inner.bos_token
        if chat:
            text = self._templated(text)
        whole = chat or (bos is not None and text.startswith(bos))
        return list(self._inner.encode(text, add_special_tokens=not whole))

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self.size]
        return str(self._inner.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _templated(self, text: str) -> str:
        if not self._inner.chat_template:
            raise TokenizerError(f"{self._folder}: the tokenizer has no chat template")
        message = [{"role": "user", "content": text}]
        return str(self._inner.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


class ByteTokenizer:
    """UTF-8 bytes as ids 0 … 255, and three special ids. Text begins with BOS."""

    bos, eos, pad = 256, 257, 258
    size = 259

    def encode(self, text: str, chat: bool = False) -> list[int]:
        if chat:
            raise TokenizerError("tiny: the tokenizer of bytes has no chat template")
        return [self.bos, *text.encode("utf-8")]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")
