"""A task's own options: read strictly, as every other key of a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from vexact.tasks.task import TaskError

T = TypeVar("T")
_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def options_of(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A frozen dataclass of plain values. where: the key that holds them. Raises TaskError naming the option."""
    hints = get_type_hints(kind)
    check_names(values, [item.name for item in fields(kind)], where)  # type: ignore[arg-type]
    return kind(**{name: _typed(value, hints[name], f"{where}.{name}") for name, value in values.items()})


def check_names(given: Iterable[str], known: Iterable[str], where: str, what: str = "option") -> None:
    """Raises TaskError for the first name that is not known, with the nearest that is."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}"
            raise TaskError(f"{where}: unknown {what} {name}; {hint}")


def check_range(least: int, most: int, where: str, **values: int) -> None:
    """Raises TaskError for a value outside least … most."""
    for name, value in values.items():
        if not least <= value <= most:
            raise TaskError(f"{where}.{name} = {value} is outside {least} … {most}")


def _typed(value: Any, kind: type, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TaskError(f"{where} = {value!r} is not {_NAMES[kind]}")
    return value
