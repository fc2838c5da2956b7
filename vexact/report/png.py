"""The same charts as PNG, for slides and papers: drawn by matplotlib, placed by the same scales."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vexact.report.figure import SHAPES, SLOTS, Grey, Line, Panel, Points, Scale
from vexact.report.svg import ZERO

# Okabe and Ito's palette without its yellow, which is too faint on white; the same in page.css.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00", "#7f4fc9")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (2, 1.5)),
    (0, (7, 2, 2, 2)),
    (0, (4, 1)),
    "-",
    (0, (6, 2)),
    (0, (2, 1.5)),
)
MARKERS = dict(zip(SHAPES, "os^DvXPh", strict=True))
OTHERS = "#b4b4b4"
LONGEST = 10  # entries of a legend


def write_figures(panels: Sequence[Panel], lit: Sequence[int], many: bool, folder: Path) -> list[Path]:
    """One PNG a panel, 1600 pixels wide."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels:
        rows = len(panel.y.categories)
        figure = Figure(figsize=(8.0, 5.0 if not rows else 1.6 + 0.26 * rows), layout="constrained")
        _draw(figure.subplots(), panel, {arm: i % SLOTS for i, arm in enumerate(lit)}, many)
        written.append(folder / f"{panel.id}.png")
        with warnings.catch_warnings():  # of letters that its font lacks; the page has them
            warnings.filterwarnings("ignore", message="Glyph")
            figure.savefig(written[-1], dpi=200)
    return written


def _draw(axes: Any, panel: Panel, slots: dict[int, int], many: bool) -> None:
    x, y = panel.scales()
    for mark in sorted(panel.marks, key=lambda mark: getattr(mark, "arm", -1) in slots):
        if isinstance(mark, Grey):
            axes.fill_between(_shares(x, mark.x), _shares(y, mark.low), _shares(y, mark.high), color="#999999",
                              alpha=0.35, lw=0, label=_plain(mark.label))  # fmt: skip
        elif isinstance(mark, Line | Points):
            slot = slots.get(mark.arm)
            colour = COLOURS[slot] if slot is not None else OTHERS if many else COLOURS[0]
            label = _plain(mark.label) if slot is not None else None
            if isinstance(mark, Line):
                _line(axes, mark, x, y, colour, slot, label)
            else:
                _points(axes, mark, x, y, colour, label)
        elif mark.x is not None:
            axes.axvline(x.share(mark.x), color="#555555", lw=1, ls="--")
        elif mark.y is not None:
            axes.axhline(y.share(mark.y), color="#555555", lw=1, ls="--")
        else:
            ends = max(x.low, y.low), min(x.high, y.high)
            axes.plot(_shares(x, ends), _shares(y, ends), color="#555555", lw=1, ls="--")
    for scale, which in ((x, axes.xaxis), (y, axes.yaxis)):
        ticks = scale.ticks(6)
        which.set_ticks([share for share, _ in ticks], [_plain(name) for _, name in ticks])
    for edge in y.edges():
        axes.axhline(edge, color="#999999", lw=0.8, ls=":")
    for edge in x.edges():
        axes.axvline(edge, color="#999999", lw=0.8, ls=":")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_xlabel(_plain(panel.x.label))
    axes.set_ylabel(_plain(panel.y.label))
    axes.set_title(_plain(panel.title), loc="left", fontsize=12)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if y.empty:
        axes.text(0.5, 0.55, ZERO, ha="center", color="#555555")
    _legend(axes, panel)


def _line(axes: Any, mark: Line, x: Scale, y: Scale, colour: str, slot: int | None, label: str | None) -> None:
    across = _shares(x, mark.x)
    if mark.low and slot is not None:
        axes.fill_between(across, _shares(y, mark.low), _shares(y, mark.high), color=colour, alpha=0.15, lw=0)
    style = DASHES[slot] if slot is not None else "-"
    axes.plot(across, _shares(y, mark.y), color=colour, ls=style, lw=1.8 if slot is not None else 0.7, label=label)


def _points(axes: Any, mark: Points, x: Scale, y: Scale, colour: str, label: str | None) -> None:
    across, up = _shares(x, mark.x), _shares(y, mark.y)
    if mark.low:
        ends = [_shares(x if mark.across else y, each) for each in (mark.low, mark.high)]
        for a, b, low, high in zip(across, up, *ends, strict=True):
            axes.plot(*(([low, high], [b, b]) if mark.across else ([a, a], [low, high])), color=colour, lw=1)
    face = "white" if mark.hollow else colour
    axes.plot(across, up, MARKERS[mark.shape], ls="", mec=colour, mfc=face, label=label, clip_on=False)


def _legend(axes: Any, panel: Panel) -> None:
    """Of an axis of names none is needed; of what has one name a single entry."""
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    if entries and not panel.y.categories:
        chosen = dict(list(entries.items())[:LONGEST])
        axes.legend(
            list(chosen.values()), list(chosen), fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
        )


def _shares(scale: Scale, values: Sequence[float]) -> list[float]:
    return [scale.share(value) if not math.isnan(value) else math.nan for value in values]


def _plain(text: str) -> str:
    """Without matplotlib's own signs for mathematics."""
    return text.replace("$", r"\$")
