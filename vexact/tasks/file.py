"""Questions from a file: JSONL or parquet, in TRL's form or in verl's.

TRL: `prompt` (text, or messages) and any further columns, as `solution`. verl: `data_source`, `prompt` (messages),
`reward_model: {ground_truth}`, `extra_info`. Which one a row has is seen from its columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vexact.recipe import TaskSection
from vexact.tasks.options import check_names, options_of
from vexact.tasks.split import is_held_out
from vexact.tasks.task import Item, Prompt, Split, TaskError, check_index, text_of

OPTIONS = "task.options"


@dataclass(frozen=True)
class FileOptions:
    """`task.options` of a file.

    path: the questions. held_out_path: those for evaluation; a question that is there too is never trained on. prompt:
    the column that asks. answer: the column that is right; by default reward_model.ground_truth, solution or answer.
    shuffle: a new order for each pass, addressed by (seed, pass).
    """

    path: str = ""
    held_out_path: str = ""
    prompt: str = "prompt"
    answer: str = ""
    shuffle: bool = True


class File:
    """The reward is 1 where a completion is the answer, spaces around it aside; most files need a reward function.

    Items are the rows, pass after pass; the held-out ones keep the order of their file.
    """

    binary = True

    def __init__(self, section: TaskSection, seed: int) -> None:
        own = options_of(FileOptions, section.options, OPTIONS)
        if not own.path:
            raise TaskError(f"task file needs {OPTIONS}.path")
        if own.held_out_path and section.held_out:
            raise TaskError(f"task.held_out and {OPTIONS}.held_out_path both name questions for evaluation; choose one")
        self.stop, self._own, self._seed = section.stop, own, seed
        rows = Rows(Path(own.path), own)
        self._rows: dict[Split, Rows] = {"train": rows, "held_out": rows}
        if own.held_out_path:
            self._rows["held_out"] = Rows(Path(own.held_out_path), own)
            asked = {text_of(prompt) for prompt in self._rows["held_out"].prompts}
            held_out = [text_of(prompt) in asked for prompt in rows.prompts]
            self._places = {"held_out": list(range(len(self._rows["held_out"])))}
        else:
            held_out = [is_held_out(text_of(prompt), section.held_out) for prompt in rows.prompts]
            self._places = {"held_out": [i for i, out in enumerate(held_out) if out]}
        self._places["train"] = [i for i, out in enumerate(held_out) if not out]
        self._order = lru_cache(maxsize=2)(self._ordered)
        if not section.reward.function and not self.item(0).answer:
            raise TaskError(
                f"{own.path}: has no column solution or answer; name task.reward.function or {OPTIONS}.answer"
            )

    def count(self, split: Split) -> int:
        return len(self._places[split])

    def item(self, index: int, split: Split = "train") -> Item:
        check_index(index)
        rows, count = self._rows[split], self.count(split)
        if not count:
            raise TaskError(f"{rows.path}: no row belongs to the split {split}; see task.held_out")
        around, place = divmod(index, count)
        row = self._order(around)[place] if split == "train" else place
        at = self._places[split][row]
        columns = rows.columns(at)
        return Item(index, rows.prompts[at], self._answer(columns), _solution(columns), columns)

    def reward(self, item: Item, completion: str) -> float:
        if not item.answer:
            raise ValueError(f"item {item.index} has no answer")
        return float(completion.strip() == item.answer.strip())

    def _ordered(self, around: int) -> NDArray[np.int64] | range:
        """A permutation of the training rows: they are sorted by the words of a generator of their own."""
        count = self.count("train")
        if not self._own.shuffle:
            return range(count)
        key = int.from_bytes(hashlib.sha256(f"rows/{self._seed}/{around}".encode()).digest()[:16], "little")
        return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")

    def _answer(self, columns: Mapping[str, Any]) -> str:
        if self._own.answer:
            return _text(columns.get(self._own.answer))
        judged = columns.get("reward_model")
        if isinstance(judged, Mapping):
            return _text(judged.get("ground_truth"))
        return _text(columns.get("solution", columns.get("answer")))


class Rows:
    """The rows of one file. All prompts are read and checked at once; a parquet file's other columns when asked for."""

    def __init__(self, path: Path, own: FileOptions) -> None:
        self.path, self._prompt = path, own.prompt
        if path.suffix not in (".jsonl", ".parquet"):
            raise TaskError(f"{path}: must be a .jsonl or .parquet file")
        try:
            self._table = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
        except FileNotFoundError:
            raise TaskError(f"{path}: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
        check_names(filter(None, [own.prompt, own.answer]), self._table.names, str(path), "column")
        values = self._table.column(own.prompt)
        self.prompts: list[Prompt] = [_checked_prompt(value, f"{path}: row {i + 1}") for i, value in enumerate(values)]

    def __len__(self) -> int:
        return len(self.prompts)

    def columns(self, at: int) -> dict[str, Any]:
        """All of a row but its prompt."""
        return {name: value for name, value in self._table.row(at).items() if name != self._prompt}


class _Lines:
    """A JSONL file as a table."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows
        self.names = list(dict.fromkeys(name for row in rows for name in row))

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def row(self, at: int) -> dict[str, Any]:
        return self._rows[at]


class _Parquet:
    """A table of pyarrow's."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.names: list[str] = list(table.column_names)

    def column(self, name: str) -> list[Any]:
        return list(self._table.column(name).to_pylist())

    def row(self, at: int) -> dict[str, Any]:
        return dict(self._table.slice(at, 1).to_pylist()[0])


def _read_jsonl(path: Path) -> _Lines:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TaskError(f"{path}: line {number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise TaskError(f"{path}: line {number} holds {type(row).__name__}, not keys and values")
        rows.append(row)
    if not rows:
        raise TaskError(f"{path}: has no rows")
    return _Lines(rows)


def _read_parquet(path: Path) -> _Parquet:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TaskError(f"{path}: parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise TaskError(f"{path}: is not parquet ({' '.join(str(error).split())})") from None
    if not table.num_rows:
        raise TaskError(f"{path}: has no rows")
    return _Parquet(table)


def _checked_prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise TaskError(f"{where}: the prompt is {type(value).__name__}, must be text or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TaskError(f"{where}: a message of the prompt has no role and content of text")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _solution(columns: Mapping[str, Any]) -> str:
    """TRL's `completion`, the working that verl's data keep in extra_info.answer, or `solution`; else nothing."""
    written = columns.get("completion")
    if isinstance(written, list) and written and isinstance(written[-1], Mapping):
        written = written[-1].get("content")
    extra = columns.get("extra_info")
    if written is None and isinstance(extra, Mapping):
        written = extra.get("answer")
    return _text(columns.get("solution") if written is None else written)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
