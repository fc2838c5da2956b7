"""How a section declares its values: a default, and beside it the range or the choices."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from vexact.errors import BadInput


class RecipeError(BadInput):
    """A recipe that cannot be run. One line: file or flag, key, what is wrong."""


def number(default: Any, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf) -> Any:
    return field(default=default, metadata={"at_least": at_least, "above": above, "below": below})


def choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": (default, *choices)})


def words(*known: str) -> Any:
    """A list of some of the known words, by default empty."""
    return field(default=(), metadata={"words": known})


OPEN = {"free": True}  # metadata of a mapping with somebody else's keys: they are checked where they are used
