"""The page: one file that holds all it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from vexact.report import by_step, delta_charts, dose, gaps, heatmap, svg
from vexact.report.deltas import INSTALL, Deltas, deltas_of, read_deltas, readable
from vexact.report.figure import Panel
from vexact.report.headline import CLASSES, SIGNS, few_seeds, headline, verdict_of
from vexact.report.heatmap import Shown
from vexact.report.number import pairs
from vexact.report.reading import ReportError
from vexact.report.study import EXACT, Study
from vexact.report.table import table


@dataclass(frozen=True)
class Findings:
    """What rollouts gave: Δ of arms by name, and the rollouts that are shown."""

    deltas: Mapping[str, Deltas] = field(default_factory=dict)
    shown: Mapping[str, Sequence[Shown]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "deltas": {name: each.document() for name, each in self.deltas.items()},
            "rollouts": {name: [shown.document() for shown in each] for name, each in self.shown.items()},
        }

    @classmethod
    def of(cls, study: Study) -> Findings:
        """From the rollouts of the study's runs; of arms without any, from its `distributions`. Raises ReportError."""
        kept = study.distributions
        try:
            deltas = read_deltas(kept.get("deltas", {}))
            shown = {name: [Shown.read(each) for each in rows] for name, rows in kept.get("rollouts", {}).items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ReportError(f"deltas.json.gz: not what vexact report --keep writes: {error}") from None
        found = {arm.name: each for arm in study.arms if (each := deltas_of(arm)) is not None}
        deltas = {**deltas, **found}
        largest = {name: each.largest for name, each in deltas.items()}
        chosen = heatmap.chosen_arms(study, largest)
        fresh = {arm.name: rows for arm in chosen if arm.name in found and (rows := heatmap.rollouts_of(arm))}
        return cls(deltas, {**shown, **fresh})


@dataclass(frozen=True)
class Section:
    """A heading with charts below it. missing: why there is none, or what is left out of them."""

    id: str
    title: str
    panels: tuple[Panel, ...] = ()
    missing: tuple[str, ...] = ()
    folded: bool = False

    @property
    def tall(self) -> bool:
        """Whether one of its charts is much higher than its neighbours."""
        return any(len(panel.y.categories) > 14 for panel in self.panels)


def sections(study: Study, findings: Findings) -> list[Section]:
    """Every section that a report may have; one without charts says why."""
    drawn, absent = by_step.panels(study)
    gradient, _ = by_step.panels(study, by_step.GRADIENT)
    doses, no_dose = dose.panels(study)
    gap, no_gap = gaps.gap_panels(study)
    ess, no_ess = gaps.ess_panel(study)
    deltas = delta_charts.panels(study, findings.deltas)
    no_delta = INSTALL if not readable() else "no run has kept rollouts that the trainer compared"
    left_out = f"No run has measured: {', '.join(absent)}." if drawn else "No run has left metrics yet."
    effects = [
        (doses, f"Dose and response: {no_dose}."),
        (gap, f"Gap to the exact arm: {no_gap}."),
        ([ess] if ess else [], f"ESS against collapse: {no_ess}."),
    ]
    several = by_step.small_multiples(study)
    found = [
        Section("by-step", "By step", tuple(drawn), (left_out,) if absent else ()),
        Section("gradient", "Gradient by step", tuple(gradient)),
        Section("each", "Each arm beside the exact one", tuple(several), folded=True),
        Section(
            "effects", "Dose, gap and collapse", tuple(panel for panels, _ in effects for panel in panels),
            tuple(why for panels, why in effects if not panels),
        ),
        Section("deltas", "Distribution of Δ", tuple(deltas), () if deltas else (f"Distribution of Δ: {no_delta}.",)),
    ]  # fmt: skip
    return [section for section in found if section.panels or section.missing]


def figures(parts: Sequence[Section]) -> list[Panel]:
    """What has a PNG beside the page."""
    return [panel for section in parts for panel in section.panels if not panel.small]


def render(study: Study, findings: Findings, parts: Sequence[Section], version: str) -> str:
    """The page."""
    lit = by_step.lit_arms(study)
    many = study.many
    nulls = set(study.chance)
    names, rows = table(study)
    folder = files("vexact.report") / "page"
    read = lambda name: folder.joinpath(name).read_text(encoding="utf-8")  # noqa: E731
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    shown = [arm for arm in study.arms if findings.shown.get(arm.name)]
    most = max((each.largest for arm in shown for each in findings.shown[arm.name]), default=0.0)
    maps = [(arm, heatmap.draw(rows), arm.role == EXACT or max(each.largest for each in rows) == most)
            for arm in shown for rows in [findings.shown[arm.name]]]  # fmt: skip
    return environment.from_string(read("page.html.jinja")).render(
        study=study,
        headline=headline(study),
        few=few_seeds(study),
        claims=[(claim, verdict_of(claim), pairs(claim.numbers)) for claim in study.claims],
        signs=SIGNS,
        classes=CLASSES,
        drawn=[section for section in parts if section.panels],
        left_out=[line for section in parts for line in section.missing],
        chart=lambda panel: svg.draw(panel, lit, many and not panel.small, set() if panel.small else nulls),
        legend=svg.legend([arm.label for arm in study.arms], [arm.role for arm in study.arms], lit, many),
        many=many,
        nulls=nulls,
        maps=maps,
        names=names,
        rows=rows,
        style=Markup(read("page.css")),
        script=Markup(read("page.js")),
        version=version,
    )


def dump(findings: Findings) -> bytes:
    """What `--keep` writes, before it is packed."""
    return json.dumps(findings.document(), separators=(",", ":"), ensure_ascii=False).encode()
