"""A recipe: everything that a training run depends on, as frozen dataclasses read from a YAML file.

Each value has a type and a range that live beside its default. A key that is not known is refused by name, from a file
and from the command line alike.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from vexact.errors import BadInput


class RecipeError(BadInput):
    """A recipe that cannot be run. One line: file or flag, key, what is wrong."""


def _number(default: Any, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf) -> Any:
    return field(default=default, metadata={"at_least": at_least, "above": above, "below": below})


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": (default, *choices)})


@dataclass(frozen=True)
class ModelSection:
    """Where the weights come from and the dtype they are computed in."""

    path: str = "tiny"  # a Hugging Face folder, or `tiny`
    dtype: str = _choice("checkpoint", "float32", "bfloat16", "float16")  # `checkpoint`: the one it names


@dataclass(frozen=True)
class TaskSection:
    """What is asked and how it is scored."""

    name: str = _choice("chain_sum")
    terms: int = _number(2, at_least=1)
    digits: int = _number(1, at_least=1)
    shots: int = _number(4, at_least=0)  # solved examples in front of each question


@dataclass(frozen=True)
class SamplingSection:
    """What a step samples. The last three change the speed and no bit."""

    prompts: int = _number(8, at_least=1)  # of a step
    samples: int = _number(4, at_least=1)  # of a prompt: the group
    temperature: float = _number(1.0, above=0.0)
    max_tokens: int = _number(8, at_least=1)  # of a completion
    tokens_per_step: int = _number(512, at_least=1)
    chunk: int = _number(256, at_least=1)
    running: int = _number(64, at_least=1)


@dataclass(frozen=True)
class LossSection:
    """Advantages and the clipped surrogate."""

    advantage: str = _choice("group_std", "group_mean")  # (r - mean) / (std + 1e-6), or r - mean
    clip_low: float = _number(0.2, above=0.0, below=1.0)  # ratios below 1 - clip_low are clipped where A < 0
    clip_high: float = _number(0.2, above=0.0)  # ratios above 1 + clip_high are clipped where A > 0
    aggregation: str = _choice("token_mean", "sequence_mean", "fixed")
    fixed_length: int = _number(1, at_least=1)  # tokens a rollout counts for under `fixed`


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW on float32 masters. Weight decay moves matrices only, not norms and biases."""

    lr: float = _number(1e-6, above=0.0)
    beta1: float = _number(0.9, at_least=0.0, below=1.0)
    beta2: float = _number(0.999, at_least=0.0, below=1.0)
    eps: float = _number(1e-8, above=0.0)
    weight_decay: float = _number(0.0, at_least=0.0)
    max_grad_norm: float = _number(1.0, above=0.0)
    tokens_at_once: int = _number(1024, at_least=1)  # of a micro-batch; changes memory and speed, no bit


@dataclass(frozen=True)
class RunSection:
    """Where results go."""

    root: str = "runs"
    folder: str = ""  # by default ROOT/NAME-TIME
    checkpoint: bool = True  # save the trained weights at the end


@dataclass(frozen=True)
class Recipe:
    """A training run. `seed` addresses data and draws; nothing else is random."""

    name: str = "train"
    seed: int = _number(0, at_least=0, below=2.0**63)
    steps: int = _number(5, at_least=0)
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    loss: LossSection = field(default_factory=LossSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    run: RunSection = field(default_factory=RunSection)

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; `load_recipe` reads it back."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Mapping[str, str] | Sequence[str] = ()) -> Recipe:
    """Read a YAML file, then lay overrides over it.

    overrides: dotted key → text, or the words of a command line (`--optimizer.lr 1e-5 --steps=5`). Raises RecipeError.
    """
    values = dict(_flatten(_read(Path(path)), str(path)))
    sources = dict.fromkeys(values, str(path))
    pairs = overrides if isinstance(overrides, Mapping) else _pairs(overrides)
    for key, text in pairs.items():
        values[key], sources[key] = _parse(key, text), f"--{key}"
    known = dict(_keys(Recipe))
    for key in values:
        if key not in known:
            raise RecipeError(f"{sources[key]}: unknown key {key}{_hint(key, known)}")
    checked = {key: _checked(value, *known[key], f"{sources[key]}: {key}") for key, value in values.items()}
    return _build(Recipe, checked, "")


def _read(path: Path) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    return {} if content is None else content


def _flatten(content: Any, source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys. A section's name with a plain value stays and is refused as a key that takes none."""
    if not isinstance(content, dict):
        raise RecipeError(f"{source}: holds {type(content).__name__}, not keys and values")
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _flatten(value, source, f"{key}.")
        elif value is None and key in _SECTIONS:
            continue  # a section with nothing in it
        else:
            yield key, value


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


_SECTIONS = frozenset(name for name, kind in get_type_hints(Recipe).items() if is_dataclass(kind))


def _hint(key: str, known: Mapping[str, Any]) -> str:
    if key in _SECTIONS:
        return f"; {key} is a section with keys of its own, as {next(k for k in known if k.startswith(f'{key}.'))}"
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(list(known))}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    near = near or [by_leaf[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], by_leaf, n=1)]
    return f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"


def _checked(value: Any, kind: type, item: Field[Any], where: str) -> Any:
    """The value in its type, inside its range. YAML 1.1 reads 1e-6 as text: numbers may come as text."""
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            raise RecipeError(f"{where} = {value!r} is not a number") from None
    elif kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{where} = {value!r} is not {_NAMES[kind]}")
    limits = item.metadata
    if "choices" in limits and value not in limits["choices"]:
        raise RecipeError(f"{where} = {value!r} is not one of {', '.join(limits['choices'])}")
    if "above" in limits:
        _check_range(value, limits, where)
    return value


def _check_range(value: Any, limits: Mapping[str, float], where: str) -> None:
    if not math.isfinite(value):
        raise RecipeError(f"{where} = {value} is not finite")
    if value < limits["at_least"]:
        raise RecipeError(f"{where} = {value} is below {limits['at_least']:g}")
    if value <= limits["above"]:
        raise RecipeError(f"{where} = {value} must be above {limits['above']:g}")
    if value >= limits["below"]:
        raise RecipeError(f"{where} = {value} must be below {limits['below']:g}")


_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


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
