"""From claims in a study file to verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from vexact.experiments.claims import RULES, WORDS
from vexact.experiments.endpoints import NAMES
from vexact.experiments.evidence import Evidence
from vexact.experiments.study import ClaimSpec, Study, StudyError
from vexact.experiments.verdict import CONFIRMED, INCONCLUSIVE, NOT_TESTABLE, Rule, Verdict
from vexact.tasks.options import options_of

PATTERNS = ("arms", "against", "placebo", "best", "untreated", "control", "unit")
BESIDE = {
    "gap": ("arms",),
    "dose-response": ("arms", "placebo"),
    "best": ("arms", "best", "untreated"),
}  # one exact arm
ENDPOINTS = ("endpoint", "first", "second")


def rule_of(claim: ClaimSpec, where: str = "claims") -> Rule:
    """The rule with its parameters. Raises TaskError or StudyError naming the parameter."""
    here = f"{where}: claim {claim.id}"
    kind = RULES[claim.rule]
    for item in fields(kind):
        if item.name not in claim.parameters and item.default is item.default_factory:
            raise StudyError(f"{here}: rule {claim.rule} needs {item.name}")
    rule: Rule = options_of(kind, claim.parameters, here)
    return rule


def check_claim(claim: ClaimSpec, study: Study) -> None:
    """Raises StudyError for arms and claims that are not there, endpoints and words that are not known."""
    rule: Any = rule_of(claim, study.file)
    here = f"{study.file}: claim {claim.id}"
    for name in PATTERNS:
        pattern = getattr(rule, name, "")
        if pattern and not study.matching(pattern):
            raise StudyError(f"{here}: {name} = {pattern!r} matches no arm")
    for name in ENDPOINTS:
        endpoint = getattr(rule, name, NAMES[0])
        if endpoint not in NAMES:
            raise StudyError(f"{here}: {name} = {endpoint} is not one of {', '.join(NAMES)}")
    if claim.needs and claim.needs not in _before(claim, study):
        raise StudyError(f"{here}: needs = {claim.needs!r} is no claim before it")
    for (of, name), known in WORDS.items():
        if of == claim.rule and getattr(rule, name) not in known:
            raise StudyError(f"{here}: {name} = {getattr(rule, name)} is not one of {', '.join(known)}")
    for wrong in _faults(claim, rule, study):
        raise StudyError(f"{here}: {wrong}")


def _faults(claim: ClaimSpec, rule: Any, study: Study) -> Iterator[str]:
    """What a rule and its arms cannot mean together."""
    if hasattr(rule, "fault") and rule.fault():
        yield f"rule {claim.rule}: {rule.fault()}"
    compared = [arm for name in BESIDE.get(claim.rule, ()) for arm in study.matching(getattr(rule, name))]
    beside = list(dict.fromkeys(study.reference(arm) for arm in compared))
    if len(beside) > 1:
        yield f"its arms stand beside different exact arms: {', '.join(beside)}"
    exact = [arm.name for arm in compared if arm.role == "exact"]
    if claim.rule == "gap" and exact and not rule.against:
        yield f"arm {exact[0]} is exact: say what it is compared with, as against"
    if claim.rule == "rarer" and len(study.matching(rule.arms)) != 2:
        yield f"rule rarer is about two arms, and arms = {rule.arms!r} matches {len(study.matching(rule.arms))}"


def judged(study: Study, evidence: Evidence) -> list[dict[str, Any]]:
    """The claims of a study as `results.json` has them."""
    found: list[dict[str, Any]] = []
    for claim in study.claims:
        rule = rule_of(claim, study.file)
        verdict = _granted(rule.judge(evidence), {each["id"]: each["verdict"] for each in found}, claim.needs)
        found.append(
            {
                "id": claim.id,
                "claim": claim.claim,
                "rule": rule.text() + (f" Inconclusive unless {claim.needs!r} is confirmed." if claim.needs else ""),
                "verdict": verdict.verdict,
                "numbers": dict(verdict.numbers),
            }
        )
    return found


def _granted(verdict: Verdict, verdicts: Mapping[str, str], needs: str) -> Verdict:
    """A verdict stands where the claim that it needs, as that two arms were given as much, is confirmed."""
    if not needs or verdict.verdict == NOT_TESTABLE or verdicts[needs] == CONFIRMED:
        return verdict
    return Verdict(INCONCLUSIVE, {**verdict.numbers, "needs": {needs: verdicts[needs]}})


def _before(claim: ClaimSpec, study: Study) -> list[str]:
    """The ids of the claims before one."""
    return [each.id for each in study.claims[: study.claims.index(claim)]]
