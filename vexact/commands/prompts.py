"""Where the requests of `vexact calibrate --model` come from: a recipe's task, or a file of prompts."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from vexact.errors import BadInput
from vexact.loop.questions import Questions
from vexact.model.config import ModelConfig
from vexact.model.tokenizer import Tokenizer, load_tokenizer
from vexact.recipe import Recipe
from vexact.rollout.request import Request
from vexact.tasks import load_task


def rounds(recipe: Recipe, config: ModelConfig, file: Path | None) -> Iterator[list[Request]]:
    """Without an end, no request twice: the steps of the recipe, or the file's prompts again and again.

    Of the recipe only model, seed, task and sampling are used. Raises BadInput for what cannot be asked.
    """
    if file is None:
        questions = Questions(recipe, load_task(recipe.task, recipe.seed), load_tokenizer(recipe.model.path), config)
        return (questions.requests(step, questions.items(step)) for step in count())
    prompts = read_prompts(file, recipe.model.path)
    sampling, stop = recipe.sampling, frozenset(config.eos_token_ids)
    return (
        [
            Request((turn << 32) + i, prompt, 1, sampling.temperature, recipe.seed, sampling.max_tokens, stop)
            for i, prompt in enumerate(prompts)
        ]
        for turn in count()
    )


def read_prompts(path: Path, model: str) -> list[list[int]]:
    """Ids of each prompt: texts a line, or of `.jsonl` the objects' `prompt_ids`, or else their `prompt`.

    `.gz` behind either is unpacked; blank lines are passed over. Raises BadInput naming the line.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInput(f"--prompts: {path}: cannot be read ({error})") from None
    is_json = Path(path.name.removesuffix(".gz")).suffix in (".jsonl", ".json")
    tokenizer: list[Tokenizer] = []  # loaded where a text asks for it: ids need none

    def encoded(prompt: str) -> list[int]:
        if not tokenizer:
            tokenizer.append(load_tokenizer(model))
        return tokenizer[0].encode(prompt)

    prompts = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            given = _prompt(line, f"{path} line {number}") if is_json else line
            prompts.append(encoded(given) if isinstance(given, str) else given)
    if not prompts:
        raise BadInput(f"--prompts: {path}: holds no prompt")
    return prompts


def _prompt(line: str, where: str) -> str | list[int]:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: not JSON: {error}") from None
    found = record.get("prompt_ids", record.get("prompt")) if isinstance(record, dict) else None
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(type(token) is int for token in found):
        return found
    raise BadInput(f"{where}: has neither prompt_ids, a list of token ids, nor a text prompt")
