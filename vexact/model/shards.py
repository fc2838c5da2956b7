"""The safetensors files of a Hugging Face folder: what they hold, checked before any of it is used.

A file is eight bytes (the header's length), a header in JSON, and the tensors' bytes. The header is read here, so that
an error can name the tensor; the bytes are mapped by the safetensors library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class CheckpointError(BadInput):
    """Weights that are not the model's. One line: file, tensor, what is wrong."""


@dataclass(frozen=True)
class Stored:
    """One tensor as its file's header describes it."""

    file: Path
    dtype: str  # as safetensors spells it: "F32", "BF16", "F16" and others that are refused
    shape: tuple[int, ...]


def inventory(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder, from model.safetensors or from the shards that an index names."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise CheckpointError(f"{folder}: has both {SINGLE} and {INDEX}; remove one")
    if single.is_file():
        return _header(single)
    if not index.is_file():
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise CheckpointError(f"{index}: weight_map is not an object of file names")
    return _sharded(index, places)


def _sharded(index: Path, places: Mapping[str, str]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for shard in sorted(set(places.values())):
        path = index.parent / shard
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: {shard} is not a plain file name")
        if not path.is_file():
            name = next(name for name, place in places.items() if place == shard)
            raise CheckpointError(f"{path}: no such file, though {INDEX} places {name} there")
        for name, stored in _header(path).items():
            if places.get(name) != shard:
                raise CheckpointError(f"{path}: holds {name}, which {INDEX} does not place there")
            found[name] = stored
    for name, shard in places.items():
        if name not in found:
            raise CheckpointError(f"{index.parent / shard}: lacks {name}, which {INDEX} places there")
    return found


def _header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path}: is cut short inside its header")
        text = file.read(length)
    found: dict[str, Stored] = {}
    for name, (stored, begin, end) in _entries(path, text).items():
        if 8 + length + end > size:
            raise CheckpointError(f"{path}: is cut short inside {name}")
        if stored.dtype in STORED and end - begin != _bytes(stored):
            raise CheckpointError(f"{path}: {name} has {end - begin} bytes, not the {_bytes(stored)} of its shape")
        found[name] = stored
    return found


def _entries(path: Path, text: bytes) -> dict[str, tuple[Stored, int, int]]:
    """Name → tensor, and where its bytes begin and end behind the header."""
    try:
        entries: dict[str, dict[str, Any]] = json.loads(text)
        return {name: _entry(path, entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: its header is not one of safetensors") from None


def _entry(path: Path, entry: Mapping[str, Any]) -> tuple[Stored, int, int]:
    begin, end = entry["data_offsets"]
    return Stored(path, str(entry["dtype"]), tuple(map(int, entry["shape"]))), int(begin), int(end)


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * STORED[stored.dtype].itemsize


def check(folder: Path, stored: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Exactly the expected tensors, in their shapes and in a storage dtype."""
    missing = [name for name in expected if name not in stored]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder}: {missing[0]} is missing{more}")
    for name, found in stored.items():
        if name not in expected:
            raise CheckpointError(f"{found.file}: {name} is not a parameter of the model that config.json describes")
        if found.shape != expected[name]:
            raise CheckpointError(f"{found.file}: {name} has shape {list(found.shape)}, not {list(expected[name])}")
        if found.dtype not in STORED:
            raise CheckpointError(f"{found.file}: {name} is stored as {found.dtype}; supported: {', '.join(STORED)}")


def read(stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Tensors mapped from their files, one shard after the other."""
    tensors: dict[str, Tensor] = {}
    for path in sorted({found.file for found in stored.values()}):
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name, found in stored.items() if found.file == path})
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    return tensors
