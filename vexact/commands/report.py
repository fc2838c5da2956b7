"""`vexact report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vexact.report import write_report

if TYPE_CHECKING:
    from vexact.cli import Report


def run(args: Report) -> int:
    report = write_report(args.runs, args.output, png=not args.no_png, keep=args.keep)
    for line in report.left_out:
        print(f"left out: {line.rstrip('.')}")
    if report.images:
        print(f"{len(report.images)} figures in {report.images[0].parent}")
    print(report.page)
    return 0
