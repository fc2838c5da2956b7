"""Reads a recipe from YAML and from a command line, checks every value, names what is wrong."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from vexact.recipe.keys import read_yaml
from vexact.recipe.recipe import Recipe
from vexact.recipe.values import RecipeError


def load_recipe(
    path: str | Path | None, overrides: Mapping[str, str] | Sequence[str] = (), also: Sequence[str | Path] = ()
) -> Recipe:
    """Read a YAML file, then lay further ones over it, key by key, then overrides.

    path: None for a recipe of defaults. also: files of the same form, as of one section. overrides: dotted key → text,
    or the words of a command line (`--optimizer.lr 1e-5 --steps=5`). Raises RecipeError.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for each in also if path is None else (path, *also):
        found = dict(_flatten(read_yaml(Path(each), RecipeError), str(each)))
        values |= found
        sources |= dict.fromkeys(found, str(each))
    pairs = overrides if isinstance(overrides, Mapping) else _pairs(overrides)
    for key, text in pairs.items():
        values[key], sources[key] = _parse(key, text), f"--{key}"
    _gather(values, sources)
    known = dict(_keys(Recipe))
    for key in values:
        if key not in known:
            raise RecipeError(f"{sources[key]}: unknown key {key}{_hint(key, known)}")
    checked = {key: _checked(value, *known[key], f"{sources[key]}: {key}") for key, value in values.items()}
    return _build(Recipe, checked, "")


def _flatten(content: Any, source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys. A section's name with a plain value stays and is refused as a key that takes none."""
    if not isinstance(content, dict):
        raise RecipeError(f"{source}: holds {type(content).__name__}, not keys and values")
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and prefix[:-1] not in _FREE:
            yield from _flatten(value, source, f"{key}.")
        elif value is None and key in _SECTIONS:
            continue  # a section with nothing in it
        else:
            yield key, value


def _gather(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Put the keys of somebody else's back into one mapping: task.options.terms → task.options, with terms in it."""
    for key in list(values):
        section = next((free for free in _FREE if key.startswith(f"{free}.")), None)
        if section is not None:
            inner = values.get(section, {})
            if not isinstance(inner, dict):
                raise RecipeError(f"{sources[section]}: {section} = {inner!r} is not keys and values")
            values[section] = {**inner, key[len(section) + 1 :]: values.pop(key)}
            sources.setdefault(section, sources[key])


def _pairs(words: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise RecipeError(f"{word}: overrides are written --key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise RecipeError(f"{word}: a value is missing")
            value = rest.pop(0)
        pairs[key] = value
    return pairs


def _parse(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        raise RecipeError(f"--{key}: {text!r} is not a value") from None


def _keys(section: type, prefix: str = "") -> Iterator[tuple[str, tuple[type, Field[Any]]]]:
    types = get_type_hints(section)
    for item in fields(section):
        if is_dataclass(types[item.name]):
            yield from _keys(types[item.name], f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", (types[item.name], item)


_FREE = frozenset(key for key, (_, item) in _keys(Recipe) if "free" in item.metadata)
_SECTIONS = frozenset(key[:i] for key, _ in _keys(Recipe) for i, sign in enumerate(key) if sign == ".") | _FREE


def _hint(key: str, known: Mapping[str, Any]) -> str:
    if key in _SECTIONS - _FREE:
        return f"; {key} is a section with keys of its own, as {next(k for k in known if k.startswith(f'{key}.'))}"
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(list(known))}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    near = near or [by_leaf[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], by_leaf, n=1)]
    return f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"


def _checked(value: Any, kind: type, item: Field[Any], where: str) -> Any:
    """The value in its type, inside its range. YAML 1.1 reads 1e-6 as text: numbers may come as text."""
    if "words" in item.metadata:
        return _words(value, item.metadata["words"], where)
    if "free" in item.metadata:
        kind = dict
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            raise RecipeError(f"{where} = {value!r} is not a number") from None
    elif kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    elif value is False and "off" in item.metadata.get("choices", ()):  # so YAML 1.1 reads off
        value = "off"
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{where} = {value!r} is not {_NAMES[kind]}")
    limits = item.metadata
    if "choices" in limits and value not in limits["choices"]:
        raise RecipeError(f"{where} = {value!r} is not one of {', '.join(limits['choices'])}")
    if "above" in limits:
        _check_range(value, limits, where)
    return value


def _words(value: Any, known: Sequence[str], where: str) -> tuple[str, ...]:
    """A list of known words; a single one may stand alone, and an empty text for none."""
    given = [] if value in (None, "") else [value] if isinstance(value, str) else value
    if not isinstance(given, list):
        raise RecipeError(f"{where} = {value!r} is not a list of {', '.join(known)}")
    for word in given:
        if word not in known:
            raise RecipeError(f"{where} = {word!r} is not one of {', '.join(known)}")
    return tuple(given)


def _check_range(value: Any, limits: Mapping[str, float], where: str) -> None:
    if not math.isfinite(value):
        raise RecipeError(f"{where} = {value} is not finite")
    if value < limits["at_least"]:
        raise RecipeError(f"{where} = {value} is below {limits['at_least']:g}")
    if value <= limits["above"]:
        raise RecipeError(f"{where} = {value} must be above {limits['above']:g}")
    if value >= limits["below"]:
        raise RecipeError(f"{where} = {value} must be below {limits['below']:g}")


_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "keys and values",
}


def _build(section: type, values: Mapping[str, Any], prefix: str) -> Any:
    types = get_type_hints(section)
    arguments: dict[str, Any] = {}
    for item in fields(section):
        key = f"{prefix}{item.name}"
        if is_dataclass(types[item.name]):
            arguments[item.name] = _build(types[item.name], values, f"{key}.")
        elif key in values:
            arguments[item.name] = values[key]
    return section(**arguments)
