"""Reports: from the folders of studies and runs one page that holds everything, and its charts as PNG.

write_report([Path("runs/e1")], Path("report.html"))
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vexact import __version__
from vexact.report.reading import ReportError, read_sources

__all__ = ["Report", "ReportError", "write_report"]


@dataclass(frozen=True)
class Report:
    """What was written. left_out: what lacks data, a line each with the reason."""

    page: Path
    images: tuple[Path, ...]
    left_out: tuple[str, ...]


def write_report(runs: Sequence[Path], page: Path, *, png: bool = True, keep: Path | None = None) -> Report:
    """Write the page, and beside it `<stem>-figures/<figure>.png`.

    runs: folders of studies (results.json), of exported studies, or of runs, of which each is an arm.
    keep: where to write what the rollouts gave, packed JSON, for an exported study: `deltas.json.gz`.

    Raises ReportError for folders that cannot be read and for packages that are not installed.
    """
    _check_installed("jinja2", "")
    if png:
        _check_installed("matplotlib", ", or --no-png")
    from vexact.report.by_step import lit_arms
    from vexact.report.page import Findings, dump, figures, render, sections

    study = read_sources(runs)
    if page.is_dir() or not page.parent.is_dir():
        raise ReportError(f"-o {page}: is no place for a file")
    findings = Findings.of(study)
    parts = sections(study, findings)
    text = render(study, findings, parts, __version__)
    images: list[Path] = []
    if png:
        from vexact.report.png import write_figures

        images = write_figures(figures(parts), lit_arms(study), study.many, _beside(page))
    page.write_text(text, encoding="utf-8")
    if keep is not None:
        keep.write_bytes(gzip.compress(dump(findings), mtime=0))
    left_out = tuple(line for part in parts for line in part.missing)
    return Report(page, tuple(images), left_out)


def _check_installed(package: str, otherwise: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ReportError(f"{package} is not installed: pip install 'vexact[report]'{otherwise}")


def _beside(page: Path) -> Path:
    return page.with_name(f"{page.stem}-figures")
