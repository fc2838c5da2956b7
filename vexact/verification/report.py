"""A verification as a table, as JSON, as JUnit's XML and as annotations of GitHub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from vexact.verification.result import Caught, Check, Control, Line, Verification


def line(finished: Line) -> str:
    """Whatever was finished, on one line."""
    if isinstance(finished, Check):
        return check_line(finished)
    return control_line(finished) if isinstance(finished, Control) else mutant_line(finished)


def check_line(check: Check) -> str:
    """One check on one line."""
    if check.absent or check.skipped:
        return f"{check.dtype:9} {check.name:42} {check.status}: {check.absent or check.skipped}"
    found = check.found
    line = f"{check.dtype:9} {check.name:42} {found.compared:>12,} compared {found.differ:>8,} differ"
    return f"{line}  first {found.where} {found.first}".replace("  first  ", "  first ") if found.differ else line


def control_line(control: Control) -> str:
    name = "control: torch's own path must differ"
    return f"{control.dtype:9} {name:42} {control.compared:>12,} compared {control.differ:>8,} differ"


def mutant_line(caught: Caught) -> str:
    seen = f"caught by {caught.check}: {caught.differ:,} differ" if caught.differ else f"SURVIVED {caught.check}"
    return f"{caught.dtype:9} {'mutant: ' + caught.mutant:42} {seen}"


def as_json(result: Verification) -> dict[str, Any]:
    """Plain data: status, exit code, counts, and every line."""
    return {
        "model": result.model,
        "kernels": result.kernels,
        "profile": result.profile,
        "status": result.status,
        "exit_code": result.exit_code,
        "summary": result.summary,
        "compared": result.compared,
        "differ": sum(check.found.differ for check in result.checks),
        "reasons": list(result.reasons),
        "checks": [_check_json(check) for check in result.checks],
        "controls": [asdict(control) for control in result.controls],
        "mutants": [asdict(caught) for caught in result.mutants],
    }


def _check_json(check: Check) -> dict[str, Any]:
    first = check.found.first
    return {
        "name": check.name,
        "dtype": check.dtype,
        "kind": check.kind,
        "status": check.status,
        "compared": check.found.compared,
        "differ": check.found.differ,
        "first": None if first is None else {"where": check.found.where, **asdict(first)},
        "seconds": round(check.seconds, 3),
        "skipped": check.skipped,
        "absent": check.absent,
    }


def as_junit(result: Verification) -> str:
    """One test case a check, a control or a mutant. What makes the verification inconclusive is an error."""
    failures = sum(check.found.differ > 0 for check in result.checks) + len(result.survivors)
    tests = len(result.checks) + len(result.controls) + len(result.mutants) + len(result.reasons)
    suite = ElementTree.Element(
        "testsuite",
        name=f"vexact verify {result.model}",
        tests=str(tests),
        failures=str(failures),
        errors=str(len(result.reasons)),
        skipped=str(sum(bool(check.skipped or check.absent) for check in result.checks)),
        time=f"{sum(check.seconds for check in result.checks):.3f}",
    )
    for check in result.checks:
        case = _case(suite, f"{check.name} ({check.dtype})", check.seconds)
        if check.skipped or check.absent:
            ElementTree.SubElement(case, "skipped", message=check.skipped or f"does not apply: {check.absent}")
        elif check.found.differ:
            ElementTree.SubElement(case, "failure", message=check_line(check))
    for control in result.controls:
        _case(suite, f"control ({control.dtype})")
    for caught in result.mutants:
        case = _case(suite, f"mutant: {caught.mutant} ({caught.dtype})")
        if not caught.differ:
            ElementTree.SubElement(case, "failure", message=mutant_line(caught))
    for reason in result.reasons:
        ElementTree.SubElement(_case(suite, f"conclusive: {reason}"), "error", message=reason)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, name: str, seconds: float = 0.0) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname="vexact.verify", name=name, time=f"{seconds:.3f}")


def as_annotations(result: Verification) -> list[str]:
    """GitHub's workflow commands: an error for each check that differs, a warning where it is inconclusive."""
    lines = [
        f"::error title=vexact verify::{_escaped(check_line(check))}" for check in result.checks if check.found.differ
    ]
    lines += [f"::error title=vexact verify::{_escaped(mutant_line(m))}" for m in result.mutants if not m.differ]
    level = {"equal": "notice", "differs": "error", "inconclusive": "warning"}[result.status]
    return [*lines, f"::{level} title=vexact verify::{_escaped(result.summary)}"]


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def table(result: Verification) -> Any:
    """The lines as a table of rich."""
    from rich.table import Table

    view = Table(title=f"vexact verify {result.model}", title_justify="left")
    view.add_column("dtype")
    view.add_column("check")
    for title in ("compared", "differ", "seconds"):
        view.add_column(title, justify="right")
    for row in [
        *map(_check_row, result.checks),
        *map(_control_row, result.controls),
        *map(_mutant_row, result.mutants),
    ]:
        view.add_row(*row)
    return view


def _check_row(check: Check) -> Sequence[str]:
    if check.absent:
        return check.dtype, check.name, "[dim]does not apply[/]", "", ""
    if check.skipped:
        return check.dtype, check.name, "[yellow]not run[/]", "", ""
    color = {"differs": "red", "equal": "green"}.get(check.status, "yellow")
    return (
        check.dtype,
        check.name,
        f"{check.found.compared:,}",
        f"[{color}]{check.found.differ:,}[/]",
        f"{check.seconds:.1f}",
    )


def _control_row(control: Control) -> Sequence[str]:
    color = "green" if control.differ else "yellow"
    return (
        control.dtype,
        "control: torch's own path must differ",
        f"{control.compared:,}",
        f"[{color}]{control.differ:,}[/]",
        "",
    )


def _mutant_row(caught: Caught) -> Sequence[str]:
    return caught.dtype, f"mutant: {caught.mutant}", "[green]caught[/]" if caught.differ else "[red]survived[/]", "", ""
