"""`vexact compare`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from vexact.commands.model import check_writable
from vexact.errors import BadInput
from vexact.study.comparison import Comparison, Limits
from vexact.study.dumps import read_pair

if TYPE_CHECKING:
    from vexact.commands.arguments import Compare

SHOWN = (
    "tokens",
    "differing",
    "abs_mean",
    "abs_p95",
    "abs_p99",
    "abs_max",
    "k1",
    "k3",
    "ess",
    "ess_sequence",
    "pearson",
)


def run(args: Compare) -> int:
    for flag, path in (("--json", args.json), ("--junitxml", args.junitxml)):
        if path is not None:
            check_writable(flag, path)
    result = Comparison(read_pair(args.sampler, args.trainer), _limits(args))
    for name in SHOWN:
        print(f"{name:12} {_shown(result.measures[name])}")
    for each in result.judged:
        print(each.line)
    for reason in result.reasons:
        print(f"inconclusive: {reason}")
    for said in result.left_out:
        print(f"left out: {said}")
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
    if args.junitxml is not None:
        args.junitxml.write_text(as_junit(result), encoding="utf-8")
    if args.github:
        print("\n".join(as_annotations(result)))
    print(result.summary)
    return result.exit_code


def _limits(args: Compare) -> Limits:
    for flag, value in (("--max-abs", args.max_abs), ("--max-k3", args.max_k3)):
        if value is not None and not 0.0 <= value < math.inf:
            raise BadInput(f"{flag} is {value}, must be a number of at least 0")
    if args.min_tokens < 1:
        raise BadInput(f"--min-tokens is {args.min_tokens}, must be at least 1")
    if args.max_unscored < 0:
        raise BadInput(f"--max-unscored is {args.max_unscored}, must be at least 0")
    return Limits(args.max_abs, args.max_k3, args.min_tokens, args.max_unscored)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def as_junit(result: Comparison) -> str:
    """One test case a limit. What makes the comparison inconclusive is an error."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"vexact compare {result.paired.names[0]} {result.paired.names[1]}",
        tests=str(len(result.judged) + len(result.reasons)),
        failures=str(len(result.failures)),
        errors=str(len(result.reasons)),
        skipped="0",
    )
    for each in result.judged:
        case = ElementTree.SubElement(suite, "testcase", classname="vexact.compare", name=each.name)
        if each in result.failures:
            ElementTree.SubElement(case, "failure", message=each.line)
    for reason in result.reasons:
        case = ElementTree.SubElement(suite, "testcase", classname="vexact.compare", name=f"conclusive: {reason}")
        ElementTree.SubElement(case, "error", message=reason)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def as_annotations(result: Comparison) -> list[str]:
    """GitHub's workflow commands: an error for each limit that is not kept, a warning where it is inconclusive."""
    lines = [f"::error title=vexact compare::{_escaped(each.line)}" for each in result.failures]
    lines += [f"::warning title=vexact compare::{_escaped(reason)}" for reason in result.reasons]
    level = {"within": "notice", "outside": "error", "inconclusive": "warning"}[result.status]
    return [*lines, f"::{level} title=vexact compare::{_escaped(result.summary)}"]


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
