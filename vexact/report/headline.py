"""What was asked and what came out, in two sentences that follow from the claims alone."""

from __future__ import annotations

from collections import Counter

from vexact.report.study import NULL, VERDICTS, Claim, Study

# A sign and a class for each verdict: none is told by its colour alone.
SIGNS = dict(zip(VERDICTS, ("✓", "✗", "≈", "∅"), strict=True))
CLASSES = dict(zip(VERDICTS, ("yes", "no", "maybe", "untested"), strict=True))
MOST = 3  # claims that are told whole
FEW = 8  # seeds below which rules of claims give no verdict about sizes


def verdict_of(claim: Claim) -> str:
    """One of VERDICTS where it begins with one, as `not testable by construction` does; else as it stands."""
    return next((known for known in VERDICTS if claim.verdict.startswith(known)), claim.verdict)


def headline(study: Study) -> tuple[str, str]:
    seeds = sorted({len(arm.runs) for arm in study.arms})
    runs = sum(len(arm.runs) for arm in study.arms)
    some = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "0"
    size = f"{_count(len(study.arms), 'arm')}, {_count(runs, 'run')}"
    size += f", {some} seed{'s' if some != '1' else ''} each" if len(study.arms) > 1 else ""
    asked = study.question.strip() or f"No question was asked beforehand of {'this run' if runs == 1 else 'these runs'}"
    asked = asked if asked[-1] in ".?!" else asked + "."
    if not study.claims:
        return asked, f"So nothing is claimed: the charts show what was measured ({size})."
    found = Counter(verdict_of(claim) for claim in study.claims)
    parts = [
        f"{found[verdict]} {_verb(verdict)}" for verdict in (*VERDICTS, *(set(found) - set(VERDICTS))) if found[verdict]
    ]
    confirmed = [claim.claim.strip().rstrip(".") for claim in study.claims if verdict_of(claim) == VERDICTS[0]]
    told = f": {'; '.join(confirmed[:MOST])}" if confirmed else ""
    told += f"; and {len(confirmed) - MOST} more" if len(confirmed) > MOST else ""
    total = _count(len(study.claims), "claim")
    joined = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    return asked, f"Of {total}, {joined} ({size}){told}."


def _verb(verdict: str) -> str:
    return {"confirmed here": "confirmed here", "opposite": "came out opposite", "not testable": "not testable"}.get(
        verdict, verdict
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def few_seeds(study: Study) -> str:
    """What is to be said of few seeds; empty where rules take them."""
    counts = [len(arm.runs) for arm in study.arms if arm.role != NULL]
    least = min(counts, default=0)
    if not counts or least >= FEW:
        return ""
    if not least:
        return "Some arms have no finished run yet."
    what = "One seed shows what happened once" if least == 1 else f"{least} seeds give ranges"
    return f"{what}, not a verdict on what happens on average."
