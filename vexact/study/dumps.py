"""Pairs of per-token log-probabilities from files that any engine left. The shapes it knows: `vexact.study.formats`.

A file is JSON lines, one JSON document, parquet, or a dictionary of tensors saved by torch (`.pt`); `.gz` where it is
text. A run's folder stands for the parquet files of its rollouts. `file:column` names one of several columns.

Values are rounded to float32, which is what engines compute them in: decimals of any length that name the same float32
compare as equal bits.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vexact.errors import BadInput
from vexact.study.formats import SAMPLER, TRAINER, Row, rows_of

ROUNDING = 1e-4  # a log-probability this far above 0 is the rounding of float32 logits; more is no log-probability
LOWEST = -9000.0  # vLLM writes −9999 for −∞


@dataclass(frozen=True)
class Dump:
    """One column of a file. name: the file's. values: float32 [tokens] by id, None where the dump says: not found."""

    name: str
    column: str
    rows: Mapping[str, Row]
    values: Mapping[str, NDArray[np.float32] | None]

    @staticmethod
    def of(path: Path, column: str, rows: Mapping[str, Row]) -> Dump:
        return Dump(str(path), column, rows, {key: _values(str(path), column, row) for key, row in rows.items()})


@dataclass(frozen=True)
class Paired:
    """Rollouts that both sides hold, in the first one's order, their live tokens alone.

    names: of both columns. pairs: float32 [tokens] each, sampler's before trainer's. only: ids that one side alone has.
    unscored: rollouts where either side says that nothing was found; empty: those without a live token.
    tempered: of each compared rollout whose sides say different temperatures, its id and both.
    """

    names: tuple[str, str]
    ids: tuple[str, ...]
    pairs: tuple[tuple[Tensor, Tensor], ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    unscored: int
    empty: int
    tempered: tuple[tuple[str, float, float], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(sampler) for sampler, _ in self.pairs)

    @property
    def at_two_temperatures(self) -> str:
        """How many rollouts the sides have at different temperatures, and the first of them; empty where none is."""
        if not self.tempered:
            return ""
        key, one, other = self.tempered[0]
        first = f"{key} at {one:g} in {self.names[0]} and at {other:g} in {self.names[1]}"
        return f"{len(self.tempered)} rollouts are at two temperatures: {first}"


def read_pair(sampler: str, trainer: str | None = None) -> Paired:
    """sampler, trainer: `file`, `file:column` or a run's folder. Without a trainer's: the second column of the file.

    Of a trainer's file that holds a sampler's and a trainer's column, one must be named: the sampler's would often be a
    copy of the first file's, equal whatever the trainer found. Raises BadInput in one line naming file, rollout and
    position for all that cannot be compared.
    """
    path, column = _place(sampler)
    rows = _rows(path)
    one = Dump.of(path, column or _default(rows, SAMPLER, path), rows)
    if trainer is None:
        return _joined(one, Dump.of(path, _default(rows, TRAINER, path, beside=one.column), rows))
    other, second = _place(trainer)
    others = rows if other == path else _rows(other)
    return _joined(one, Dump.of(other, second or _only(others, other), others))


def read_column(given: str) -> Dump:
    """given: `file`, `file:column` or a run's folder; by default what a sampler recorded. Raises BadInput."""
    path, column = _place(given)
    rows = _rows(path)
    return Dump.of(path, column or _default(rows, SAMPLER, path), rows)


def _joined(sampler: Dump, trainer: Dump) -> Paired:
    if (sampler.name, sampler.column) == (trainer.name, trainer.column):
        raise BadInput(f"{sampler.name}: the same column on both sides: {sampler.column}")
    ids, pairs, tempered, unscored, empty = [], [], [], 0, 0
    for key, row in sampler.rows.items():
        if key not in trainer.rows:
            continue
        other = trainer.rows[key]
        _check_tokens(sampler.name, row, trainer.name, other)
        left, right = sampler.values[key], trainer.values[key]
        if left is None or right is None:
            unscored += 1
            continue
        live = _live(row, other)
        if not live.any():
            empty += 1
            continue
        ids.append(key)
        if row.divisor is not None and other.divisor is not None and row.divisor != other.divisor:
            tempered.append((key, row.divisor, other.divisor))
        pairs.append((torch.from_numpy(left[live]), torch.from_numpy(right[live])))
    only = (
        tuple(k for k in sampler.rows if k not in trainer.rows),
        tuple(k for k in trainer.rows if k not in sampler.rows),
    )
    names = f"{sampler.name} ({sampler.column})", f"{trainer.name} ({trainer.column})"
    return Paired(names, tuple(ids), tuple(pairs), only, unscored, empty, tuple(tempered))


def _live(row: Row, other: Row) -> NDArray[np.bool_]:
    live = np.ones(len(row.tokens), dtype=np.bool_)
    for side in (row, other):
        if side.live is not None:
            live &= np.array(side.live, dtype=np.bool_)
    return live


def _check_tokens(name: str, row: Row, other_name: str, other: Row) -> None:
    """Raises BadInput naming the rollout and the first position at which the two sides have other tokens."""
    pairs = [("completion", row.tokens, other.tokens)]
    if row.prompt is not None and other.prompt is not None:
        pairs.insert(0, ("prompt", row.prompt, other.prompt))
    for what, mine, theirs in pairs:
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if at is not None:
            where = f"rollout {row.id}: token {at} of the {what}"
            raise BadInput(f"{where} is {mine[at]!r} in {name} and {theirs[at]!r} in {other_name}")
        if len(mine) != len(theirs):
            raise BadInput(
                f"rollout {row.id}: the {what} has {len(mine)} tokens in {name} and {len(theirs)} in {other_name}"
            )


def _values(name: str, column: str, row: Row) -> NDArray[np.float32] | None:
    """float32 [tokens] of a rollout; tokens that are not live hold 0. Raises BadInput."""
    where = f"{name}: rollout {row.id}: {column}"
    if column not in row.columns:
        raise BadInput(f"{where} is not there; columns: {', '.join(row.columns) or 'none'}")
    given = row.columns[column]
    if given is None:
        return None
    for what, length in (("values", len(given)), ("mask entries", len(given if row.live is None else row.live))):
        if length != len(row.tokens):
            raise BadInput(f"{where} has {length} {what} for {len(row.tokens)} tokens")
    live = [True] * len(given) if row.live is None else [bool(each) for each in row.live]
    numbers = [value if alive else 0.0 for value, alive in zip(given, live, strict=True)]
    for i, value in enumerate(numbers):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise BadInput(f"{where}[{i}] is {value!r}, not a number")
        if not LOWEST <= value <= ROUNDING:  # NaN too
            raise BadInput(f"{where}[{i}] is {value}, not a log-probability")
    return np.array(numbers, dtype=np.float64).astype(np.float32)


def _default(rows: Mapping[str, Row], known: Sequence[str], path: Path, beside: str | None = None) -> str:
    """The column that a file's shape names; the one other column where a file has two of no known name."""
    columns = _columns(rows)
    found = [column for column in known if column in columns]
    others = [column for column in columns if column != beside]
    if found:
        return found[0]
    if len(others) == 1:
        return others[0]
    raise _which(path, "log-probabilities" if beside is None else f"log-probabilities beside {beside}", columns)


def _only(rows: Mapping[str, Row], path: Path) -> str:
    """The default column of a file that stands behind another. Raises BadInput where it holds what both sides found."""
    columns = _columns(rows)
    if set(columns) & set(SAMPLER) and set(columns) & set(TRAINER):
        raise _which(path, "log-probabilities to compare", columns)
    return _default(rows, SAMPLER, path)


def _columns(rows: Mapping[str, Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows.values() for column in row.columns))


def _which(path: Path, what: str, columns: Sequence[str]) -> BadInput:
    return BadInput(f"{path}: which column holds the {what}? Give FILE:COLUMN; columns: {', '.join(columns) or 'none'}")


def _place(given: str) -> tuple[Path, str | None]:
    """A path, and the column named behind a colon. Raises BadInput where nothing is there."""
    path, sign, column = given.rpartition(":")
    if not Path(given).exists() and sign and column and Path(path).exists():
        return Path(path), column
    if not Path(given).exists():
        raise BadInput(f"{given}: no such file or folder")
    return Path(given), None


def _rows(path: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for where, record in _records(path):
        for row in rows_of(record, len(rows), where):
            if row.id in rows:
                raise BadInput(f"{where}: rollout {row.id} is there twice")
            rows[row.id] = row
    if not rows:
        raise BadInput(f"{path}: no rollouts")
    return rows


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Where it is from, and a record."""
    if path.is_dir():
        found = sorted((path / "rollouts").glob("step-*.parquet")) or sorted(path.glob("*.parquet"))
        if not found:
            raise BadInput(f"{path}: no rollouts/step-*.parquet in this folder")
        for each in found:
            yield from _records(each)
    elif path.suffix == ".parquet":
        yield from ((f"{path} row {i}", record) for i, record in enumerate(_parquet(path)))
    elif path.suffix in (".pt", ".pth"):
        yield str(path), _tensors(path)
    else:
        yield from _json(path)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """Lines of JSON, or one document that takes several."""
    try:
        raw = path.read_bytes()
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8").split("\n")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{path}: not text, or damaged: {error}") from None
    if len(lines) > 1 and not _parses(next((line for line in lines if line.strip()), "")):
        lines = ["\n".join(lines)]
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {i}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{where}: not JSON: {error}") from None
        yield from ((where, each) for each in (record if isinstance(record, list) else [record]))


def _parses(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parquet(path: Path) -> Iterator[Any]:
    if importlib.util.find_spec("pyarrow") is None:
        raise BadInput(f"{path}: reading parquet needs pyarrow: pip install 'vexact[data]'")
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(256):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path}: not parquet, or damaged: {error}") from None


def _tensors(path: Path) -> Any:
    """A dictionary of tensors and lists. Raises BadInput on anything that would run code when it is loaded."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, some of them with pages of advice
        raise BadInput(f"{path}: not a dictionary of tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, Mapping):
        raise BadInput(f"{path}: not a dictionary of tensors")
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in loaded.items()}
