"""Reads a study file.

    title: Does mismatch harm?
    question: One sentence.
    recipe: modsum.yaml            # beside this file; or the recipe's keys themselves
    common: {steps: 200}           # overrides of every arm
    seeds: 5                       # 0 … 4; or a list
    warm_start: shared             # or per_seed
    rollouts: {seeds: first, every: 50}
    arms:
      - {name: exact, role: exact}
      - {name: other draws, role: null, seed_offset: 1000}
      - {name: plain exact, role: exact, overrides: {loss.advantage: reward}}
      - name: "{side} {k3}"        # two sides × two doses: four arms
        overrides: {mismatch.site: logits}
        grid:
          mismatch.side: [sampler, both-shared]
          mismatch.k3: [1.0e-3, 1.0e-2]
    claims:
      - {id: A2, claim: Mismatch alone harms., rule: dose-response, arms: "sampler *", placebo: "both-shared *"}

An arm with an objective of its own says `beside: plain exact`, or another exact arm than the first: what it is compared
with, and whose null arms say what chance does. A claim that says `needs: <id>` of one before it is inconclusive where
that one is not confirmed. An axis of a grid is a key of the recipe and its values, or a word of one's own and, for each
of its values, the overrides that it stands for. Keys that are not known are refused with the nearest one that is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vexact.experiments.claims import RULES
from vexact.experiments.judge import check_claim
from vexact.experiments.study import ROLES, Arm, ClaimSpec, Rollouts, Study, StudyError
from vexact.recipe import leaves, read_yaml
from vexact.tasks.options import check_names

KEYS = (
    "title", "question", "recipe", "common", "arms", "seeds", "warm_start", "rollouts", "keep_models", "tail", "claims",
)  # fmt: skip
ARM_KEYS = ("name", "role", "label", "beside", "overrides", "grid", "seed_offset")
WARM_STARTS = ("shared", "per_seed")
KEEPING = ("first", "all", "none")


def load_study(path: Path) -> Study:
    """Raises StudyError, or another BadInput, with one line that names file and key."""
    content = _mapping(read_yaml(path, StudyError), str(path))
    where = str(path)
    check_names(content, KEYS, where, "key")
    for key in ("recipe", "arms"):
        if key not in content:
            raise StudyError(f"{where}: {key} is missing")
    base = content["recipe"]
    if not isinstance(base, (str, dict)):
        raise StudyError(f"{where}: recipe = {base!r} is neither a file nor keys of a recipe")
    study = Study(
        file=where,
        name=path.stem,
        title=str(content.get("title", path.stem)),
        question=str(content.get("question", "")),
        base=path.parent / base if isinstance(base, str) else dict(leaves(base)),
        common=dict(leaves(_mapping(content.get("common"), f"{where}: common"))),
        arms=tuple(_arms(content["arms"], where)),
        claims=tuple(_claims(content.get("claims"), where)),
        seeds=seeds_of(content.get("seeds", 1), f"{where}: seeds"),
        warm_start=_one_of(content.get("warm_start", "shared"), WARM_STARTS, f"{where}: warm_start"),
        rollouts=_rollouts(content.get("rollouts"), f"{where}: rollouts"),
        keep_models=_bool(content.get("keep_models", False), f"{where}: keep_models"),
        tail=_count(content.get("tail", 5), f"{where}: tail", 1),
    )
    check_study(study)
    return study


def check_study(study: Study) -> None:
    """Raises StudyError for an arm whose recipe cannot be had, or a claim about arms that are not there."""
    names = [arm.name for arm in study.arms]
    for name in names:
        if names.count(name) > 1:
            raise StudyError(f"{study.file}: two arms are called {name}")
        if "," in name:
            raise StudyError(f"{study.file}: arm {name}: a name has no comma")
    exact = [arm.name for arm in study.arms if arm.role == "exact"]
    for arm in study.arms:
        if arm.beside and (arm.beside not in exact or arm.role == "exact"):
            what = "it is exact itself" if arm.role == "exact" else "that is no exact arm"
            raise StudyError(f"{study.file}: arm {arm.name}: beside = {arm.beside}: {what}")
        study.recipe(arm, study.seeds[0])
    for claim in study.claims:
        check_claim(claim, study)


def seeds_of(given: Any, where: str) -> tuple[int, ...]:
    """A count, for 0 … count − 1, or a list of different seeds."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return tuple(range(given))
    if isinstance(given, (list, tuple)) and given and all(type(seed) is int and seed >= 0 for seed in given):
        if len(set(given)) < len(given):
            raise StudyError(f"{where} = {list(given)} names a seed twice")
        return tuple(given)
    raise StudyError(f"{where} = {given!r} is neither a count nor a list of seeds")


def _arms(content: Any, where: str) -> Iterator[Arm]:
    for number, raw in enumerate(_list(content, f"{where}: arms")):
        here = f"{where}: arms[{number}]"
        values = _mapping(raw, here)
        check_names(values, ARM_KEYS, here, "key")
        if not values.get("name"):
            raise StudyError(f"{here}: name is missing")
        # YAML reads a bare `null` as nothing at all.
        role = "null" if "role" in values and values["role"] is None else values.get("role", "arm")
        plain = Arm(
            name=str(values["name"]),
            role=_one_of(role, ROLES, f"{here}.role"),
            label=str(values.get("label", "")),
            overrides=dict(leaves(_mapping(values.get("overrides"), f"{here}.overrides"))),
            seed_offset=_count(values.get("seed_offset", 0), f"{here}.seed_offset", 0),
            beside=str(values.get("beside", "")),
        )
        yield from _expanded(plain, _mapping(values.get("grid"), f"{here}.grid"), here)


def _expanded(arm: Arm, grid: Mapping[str, Any], where: str) -> Iterator[Arm]:
    """One arm for each combination, the last axis running fastest."""
    if not grid:
        yield arm
        return
    axes = [list(_axis(name, values, f"{where}.grid.{name}")) for name, values in grid.items()]
    short = [name.rpartition(".")[2] for name in grid]
    for combination in itertools.product(*axes):
        words = dict(zip(short, (word for word, _ in combination), strict=True))
        overrides = dict(arm.overrides)
        for _, chosen in combination:
            overrides.update(chosen)
        yield Arm(
            _filled(arm.name, words, where), arm.role, _filled(arm.label, words, where) if arm.label else "",
            overrides, arm.seed_offset, _filled(arm.beside, words, where) if "{" in arm.beside else arm.beside,
        )  # fmt: skip


def _axis(name: str, values: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The words of an axis and what each of them overrides."""
    if isinstance(values, Mapping):
        for word, overrides in values.items():
            yield str(word), dict(leaves(_mapping(overrides, f"{where}.{word}")))
        return
    for value in _list(values, where):
        yield _word(value), {name: value}


def _word(value: Any) -> str:
    """As short as it can be said: 1e-3 for 0.001, which YAML 1.1 may have left a text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    if number == 0.0 or abs(number) >= 0.01:
        return f"{number:g}"
    mantissa, _, exponent = f"{number:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _filled(template: str, words: Mapping[str, str], where: str) -> str:
    if "{" not in template:
        return " ".join([template, *words.values()])
    try:
        return template.format(**words)
    except (KeyError, IndexError, ValueError):
        raise StudyError(f"{where}: {template!r} may name {', '.join(f'{{{word}}}' for word in words)}") from None


def _claims(content: Any, where: str) -> Iterator[ClaimSpec]:
    for number, raw in enumerate(_list(content, f"{where}: claims")):
        here = f"{where}: claims[{number}]"
        values = _mapping(raw, here)
        for key in ("id", "claim", "rule"):
            if not values.get(key):
                raise StudyError(f"{here}: {key} is missing")
        rule = _one_of(str(values["rule"]), tuple(RULES), f"{here}.rule")
        given = {key: value for key, value in values.items() if key not in ("id", "claim", "rule", "needs")}
        joined = {key: ", ".join(map(str, v)) if isinstance(v, list) else v for key, v in given.items()}
        yield ClaimSpec(str(values["id"]), str(values["claim"]), rule, joined, str(values.get("needs") or ""))


def _rollouts(content: Any, where: str) -> Rollouts:
    values = _mapping(content, where)
    check_names(values, [item.name for item in fields(Rollouts)], where, "key")
    return Rollouts(
        _one_of(values.get("seeds", "first"), KEEPING, f"{where}.seeds"),
        _count(values.get("every", 0), f"{where}.every", 0),
    )


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise StudyError(f"{where}: holds {type(value).__name__}, not keys and values")
    return {str(key): inner for key, inner in value.items()}


def _list(value: Any, where: str) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise StudyError(f"{where} = {value!r} is not a list")
    return value


def _one_of(value: Any, choices: Sequence[str], where: str) -> str:
    if value not in choices:
        raise StudyError(f"{where} = {value!r} is not one of {', '.join(choices)}")
    return str(value)


def _count(value: Any, where: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise StudyError(f"{where} = {value!r} is not an integer of at least {least}")
    return value


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise StudyError(f"{where} = {value!r} is not true or false")
    return value
