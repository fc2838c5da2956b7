"""Studies, exported studies and plain runs, as one study.

    study/       results.json, runs/<digest>/ (a run's folder each)
    exported/    results.json, curves.json.gz: {arm: {seed: {metric: [[step, value], …]}}}; deltas.json.gz, where
                 somebody wrote it: what `vexact report --keep` made of the rollouts
    run/         config.yaml, metrics.jsonl, rollouts/: an arm of its own

A run that goes on while it is read is no fault: a last line that is not whole is left out, and said.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from vexact.errors import BadInput
from vexact.recipe import leaves, read_yaml
from vexact.report.curve import Curve
from vexact.report.study import ARM, EXACT, NULL, Arm, Claim, SeedRun, Study

RESULTS, CURVES, DELTAS = "results.json", "curves.json.gz", "deltas.json.gz"
METRICS, CONFIG = "metrics.jsonl", "config.yaml"
KEYS = ("mismatch.", "loss.remedy.", "sync.", "delay")  # of a resolved recipe: what sets an arm apart
SOME = 3  # of the runs that failed of one cause are named
ROLES = (EXACT, NULL, ARM)


class ReportError(BadInput):
    """What a report was asked of cannot be read: one line naming the file."""


def read_sources(paths: Sequence[Path]) -> Study:
    """All of them as one study: the arms of several are told apart by their folder's name. Raises ReportError."""
    if not paths:
        raise ReportError("RUN: name at least one study's folder or run's folder")
    studies = [_read_study(path) for path in paths if (path / RESULTS).is_file()]
    plain = [path for path in paths if not (path / RESULTS).is_file()]
    if plain:
        studies.append(_plain(plain))
    if len(studies) == 1:
        return studies[0]
    studies = list(_distinct(studies))
    kept: dict[str, dict[str, Any]] = {}
    for study in studies:
        for kind, arms in study.distributions.items():
            kept.setdefault(kind, {}).update(arms)
    return Study(
        title=" · ".join(study.title for study in studies),
        question=" ".join(study.question for study in studies if study.question),
        arms=tuple(arm for study in studies for arm in study.arms),
        claims=tuple(claim for study in studies for claim in study.claims),
        notes=tuple(note for study in studies for note in study.notes),
        distributions=kept,
    )


def _read_study(folder: Path) -> Study:
    file = folder / RESULTS
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("arms"), list):
        raise ReportError(f"{file}: is not the result of a study: it has no list of arms")
    curves = read_json(folder / CURVES) if (folder / CURVES).is_file() else {}
    distributions = read_json(folder / DELTAS) if (folder / DELTAS).is_file() else {}
    if not isinstance(distributions, dict) or not all(isinstance(arms, dict) for arms in distributions.values()):
        raise ReportError(f"{folder / DELTAS}: not what vexact report --keep writes")
    notes = [str(note) for note in content.get("notes") or []]
    arms = []
    for row in content["arms"]:
        try:
            arms.append(_arm(folder, row, content.get("endpoints") or {}, curves, notes))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            raise ReportError(f"{file}: arm {row if isinstance(row, str) else row.get('name', '?')}: {error}") from None
    failed: dict[str, list[str]] = {}
    for failure in content.get("failed") or []:
        failed.setdefault(str(failure.get("error")), []).append(f"{failure.get('arm')} seed {failure.get('seed')}")
    notes += [
        f"{len(which)} runs failed ({', '.join(which[:SOME])}, …): {error}"
        if len(which) > SOME
        else f"failed: {', '.join(which)}: {error}"
        for error, which in failed.items()
    ]
    claims = [
        Claim(**{key: str(row.get(key, "")) for key in ("id", "claim", "rule", "verdict")}, numbers=row.get("numbers"))
        for row in content.get("claims") or []
    ]
    title = str(content.get("title") or content.get("study") or folder.name)
    return Study(title, str(content.get("question") or ""), tuple(arms), tuple(claims), tuple(notes), distributions)


def _arm(folder: Path, row: Mapping[str, Any], endpoints: Any, curves: Any, notes: list[str]) -> Arm:
    name = str(row["name"])
    runs = []
    for run in row.get("runs") or []:
        seed = int(run.get("seed", 0))
        place = _run_folder(folder, run)
        if place is not None:
            read = read_curves(place, notes)
        else:
            read = {metric: Curve.of(points) for metric, points in curves.get(name, {}).get(str(seed), {}).items()}
        runs.append(SeedRun(seed, read, place))
    without = sum(not run.curves for run in runs)
    if without:
        notes.append(f"{name}: {without} of {len(runs)} runs have left no metrics yet.")
    ends = {key: tuple(_number(x) for x in values) for key, values in (endpoints.get(name) or {}).items()}
    role = row.get("role", ARM)
    settings = _overrides(row.get("overrides"))
    first = next((run.folder for run in runs if run.folder), None)
    resolved = read_config(first) if first else {}
    kept = {key: value for key, value in resolved.items() if key.startswith(KEYS)}
    return Arm(
        name,
        role if role in ROLES else ARM,
        str(row.get("label") or name),
        {**kept, **settings},
        tuple(runs),
        ends,
        str(row.get("beside") or ""),
    )


def _run_folder(folder: Path, run: Mapping[str, Any]) -> Path | None:
    """Of a run of a study: by its folder, as it was written or below this one, or by its digest."""
    named, digest = str(run.get("folder") or ""), str(run.get("digest") or "")
    places = [folder / named, folder / "runs" / Path(named).name] if named else []
    places += [folder / "runs" / digest] if digest else []
    return next((place for place in places if (place / METRICS).is_file()), None)


def _plain(paths: Sequence[Path]) -> Study:
    notes: list[str] = []
    arms = []
    for path in paths:
        if not path.is_dir():
            raise ReportError(f"{path}: no such folder")
        if not (path / METRICS).is_file() and not (path / CONFIG).is_file():
            raise ReportError(f"{path}: holds neither {RESULTS} of a study nor {METRICS} of a run")
        settings = read_config(path)
        run = SeedRun(int(settings.get("seed", 0)), read_curves(path, notes), path)
        arms.append(Arm(path.resolve().name, ARM, path.resolve().name, settings, (run,)))
    names = [arm.name for arm in arms]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    (study,) = _distinct([Study(title, "", tuple(arms), notes=tuple(notes))])
    return study


def _distinct(studies: Iterable[Study]) -> Iterator[Study]:
    """The same: arms of one name get a number behind it, what was kept of them too, and they stay beside the exact arm
    of their own study."""
    seen: dict[str, int] = {}
    for study in studies:
        numbered = []
        for arm in study.arms:
            count = seen[arm.name] = seen.get(arm.name, 0) + 1
            numbered.append((arm, "" if count == 1 else f" ({count})"))
        exact = {arm.name: arm.name + extra for arm, extra in numbered if arm.role == EXACT}
        first = next(iter(exact.values()), "")
        names = {arm.name: arm.name + extra for arm, extra in numbered}
        yield replace(
            study,
            arms=tuple(
                replace(arm, name=arm.name + extra, label=arm.label + extra, beside=exact.get(arm.beside, first))
                for arm, extra in numbered
            ),
            distributions={
                kind: {names.get(name, name): value for name, value in arms.items()}
                for kind, arms in study.distributions.items()
            },
        )


def read_curves(folder: Path, notes: list[str]) -> dict[str, Curve]:
    """Every metric of a run that is a number, by name; the step of a line is its own. Raises ReportError.

    notes: hears of a last line that is not whole, of values that are not finite, and of a run that is not done.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    step = -1
    for line in _lines(folder / METRICS, notes):
        step = int(line["step"])
        for name, value in line.items():
            if name != "step" and (value is None or isinstance(value, int | float)) and not isinstance(value, bool):
                points.setdefault(name, []).append((step, math.nan if value is None else float(value)))
    curves = {name: curve for name, values in points.items() if (curve := Curve.of(values)).steps}
    lost = {name: curve.lost for name, curve in curves.items() if curve.lost}
    if lost:
        worst = max(lost, key=lambda name: lost[name])
        notes.append(
            f"{folder.name}: {sum(lost.values())} values are not finite and are not drawn, most of them in {worst}."
        )
    wanted = read_config(folder).get("steps")
    if isinstance(wanted, int) and step + 1 < wanted:
        notes.append(f"{folder.name}: has reached step {step + 1} of {wanted}; what it shows is not its end.")
    return curves


def _lines(file: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        notes.append(f"{file.parent.name}: has no {METRICS} yet.")
        return
    texts = file.read_bytes().decode("utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise ValueError
        except ValueError:
            if number == len(texts):
                notes.append(f"{file.parent.name}: the last line of {METRICS} is not whole and is left out.")
                return
            raise ReportError(f"{file}: line {number} is not a line of metrics") from None
        yield line


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run, by dotted key; empty where it has none. Raises ReportError."""
    file = folder / CONFIG
    if not file.is_file():
        return {}
    content = read_yaml(file, ReportError)
    return dict(leaves(content)) if isinstance(content, Mapping) else {}


def read_json(file: Path) -> Any:
    """Of a file, packed if it is called so. Raises ReportError."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return json.loads(raw)
    except (ValueError, EOFError, OSError):
        raise ReportError(f"{file}: cannot be read as JSON") from None


def _overrides(given: Any) -> dict[str, Any]:
    """By dotted key, from a mapping or from words as `--section.key=value` or `--section.key value`."""
    if isinstance(given, Mapping):
        return dict(leaves(given))
    words = [str(word) for word in given or []]
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            found[key] = yaml.safe_load(value if equals else after)
    return found


def _number(value: Any) -> float:
    """NaN where there is none."""
    return float(value) if isinstance(value, int | float) else math.nan
