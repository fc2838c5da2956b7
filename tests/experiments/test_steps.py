"""Rules about steps give each verdict where they should, on runs that were made up for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vexact.experiments.evidence import ArmEvidence, Evidence
from vexact.experiments.steps import Leads, Matched, Rarer, Together
from vexact.experiments.verdict import CONFIRMED, INCONCLUSIVE, NOT_TESTABLE, OPPOSITE

EARLY = [5, 10, 20, 40, 80, 90, 100, 110]
RISING, FALLING = [20, 30, 50, 60, 100, 120, 130, 140], [140, 130, 120, 100, 60, 50, 30, 20]


def evidence(*arms: ArmEvidence) -> Evidence:
    return Evidence({each.name: each for each in arms})


def reached(
    name: str, first: Sequence[int | None], second: Sequence[int | None], least: Sequence[float | None] | None = None
) -> ArmEvidence:
    ends: dict[str, Sequence[float | None]] = {
        "ess_below_half": first,
        "collapse_step": second,
        "ess_min": [0.1] * len(first) if least is None else least,
        "peak_trainer": [0.8] * len(first),
    }
    return ArmEvidence(name, "arm", range(len(first)), ends)


def test_collapse_that_follows_the_effective_sample() -> None:
    assert Together("a").judge(evidence(reached("a", EARLY, RISING))).verdict == CONFIRMED
    assert Together("a").judge(evidence(reached("a", EARLY, FALLING))).verdict == OPPOSITE


def test_arms_that_differ_in_both_steps_do_not_make_them_go_together() -> None:
    """A greater lag makes both early: over all runs ρ is near 1, while inside each arm nothing follows anything."""
    free = [3, 6, 1, 8, 5, 2, 7, 4]
    arms = [reached(f"a{k}", [100 * k + i for i in range(8)], [100 * k + 10 + i for i in free]) for k in range(3)]
    found = Together("a*").judge(evidence(*arms))
    assert found.verdict == INCONCLUSIVE
    assert abs(found.numbers["rank_correlation"]["value"]) < 0.2


def test_few_runs_in_each_arm_are_few_however_many_arms() -> None:
    arms = [reached(f"a{k}", EARLY[:5], RISING[:5]) for k in range(9)]
    found = Together("a*").judge(evidence(*arms))
    assert found.verdict == INCONCLUSIVE and found.numbers["both"] == 45
    assert found.numbers["by_arm"]["a3"] == {"runs": 5, "rank_correlation": pytest.approx(1.0)}


def test_runs_that_did_not_reach_both_are_counted_and_named_and_not_correlated() -> None:
    some = reached("a", [5, 10, None, None, 60], [20, None, 50, None, 40])
    found = Together("a").judge(evidence(some))
    assert found.verdict == INCONCLUSIVE
    numbers = found.numbers
    assert (numbers["both"], numbers["ess_below_half_only"], numbers["collapse_step_only"]) == (2, 1, 1)
    assert numbers["missed"] == ["a, seed 2"] and numbers["behind"] == ["a, seed 4"]
    assert Together("a").judge(evidence(reached("a", [5], [None]))).verdict == NOT_TESTABLE


def test_a_run_that_did_not_measure_it_is_none_that_did_not_reach_it() -> None:
    blind = reached("a", [5, None, None], [20, 30, 40], [0.1, None, 0.9])
    found = Together("a").judge(evidence(blind))
    assert found.numbers["runs"] == 2 and found.numbers["missed"] == ["a, seed 2"]


def falls(success: Sequence[int | None], k3: Sequence[int | None], name: str = "a", role: str = "arm") -> ArmEvidence:
    ends: dict[str, Sequence[float | None]] = {"success_falls": success, "k3_leaves": k3}
    ends |= {"k3_start": [0.1] * len(k3), "peak_trainer": [0.8] * len(k3)}
    return ArmEvidence(name, role, range(len(k3)), ends)


STEADY = falls([None] * 8, [None] * 8, "exact", "exact")


@pytest.mark.parametrize(
    ("success", "k3", "verdict"),
    [
        ([40] * 8, [None] * 4 + [60] * 4, CONFIRMED),  # K3 rises too late, or not at all
        ([40] * 4 + [None] * 4, [30] * 8, OPPOSITE),
        ([40] * 8, [30] * 4 + [60] * 4, INCONCLUSIVE),
        ([40] * 7, [60] * 7, INCONCLUSIVE),  # too few
        ([40] * 7 + [None] * 9, [60] * 7 + [None] * 9, INCONCLUSIVE),  # that neither happened says nothing
        ([None] * 8, [None] * 8, NOT_TESTABLE),
    ],
)
def test_one_step_leads_another(success: list[int | None], k3: list[int | None], verdict: str) -> None:
    assert Leads("a", "success_falls", "k3_leaves").judge(evidence(STEADY, falls(success, k3))).verdict == verdict


@pytest.mark.parametrize(("without", "verdict"), [(2, CONFIRMED), (4, INCONCLUSIVE), (8, INCONCLUSIVE)])
def test_a_step_that_comes_without_a_cause_as_well_is_none_that_the_other_missed(without: int, verdict: str) -> None:
    other = falls([20] * without + [None] * (8 - without), [None] * 8, "other draws", "null")
    found = Leads("a", "success_falls", "k3_leaves").judge(evidence(other, falls([40] * 8, [None] * 8)))
    assert found.verdict == verdict
    assert found.numbers["without_cause"]["runs"] == 8 and found.numbers["without_cause"]["reached"] == without
    named = Leads("a", "success_falls", "k3_leaves", control="exact")
    assert named.judge(evidence(STEADY, other, falls([40] * 8, [None] * 8))).verdict == CONFIRMED
    assert named.judge(evidence(other, falls([40] * 8, [None] * 8))).verdict == INCONCLUSIVE  # nothing to compare with


def test_whose_second_step_leads_is_named() -> None:
    numbers = Leads("a", "success_falls", "k3_leaves").judge(evidence(falls([40, 40, None], [60, 30, 20]))).numbers
    assert numbers["second_leads_in"] == ["a, seed 1", "a, seed 2"]
    assert (numbers["first_leads"], numbers["k3_leaves_only"], numbers["success_falls_only"]) == (1, 1, 0)


def with_syncs(name: str, *values: float | None) -> ArmEvidence:
    return ArmEvidence(name, "arm", range(len(values)), {"syncs": values})


@pytest.mark.parametrize(
    ("mine", "seeds", "verdict"),
    [(60.0, 8, CONFIRMED), (47.0, 8, OPPOSITE), (72.0, 8, CONFIRMED), (76.0, 8, OPPOSITE), (60.0, 5, INCONCLUSIVE)],
)
def test_a_control_has_to_be_given_as_much(mine: float, seeds: int, verdict: str) -> None:
    arms = evidence(with_syncs("ess", *[60.0] * seeds), with_syncs("fixed", *[mine] * seeds))
    found = Matched("fixed, ess").judge(arms)
    assert found.verdict == verdict and found.numbers["medians"] == {"fixed": mine, "ess": 60.0}
    assert Matched("fixed").judge(arms).verdict == NOT_TESTABLE


LOST = 40


@pytest.mark.parametrize(
    ("saved", "lost", "verdict"),
    [(0, 5, CONFIRMED), (0, 4, INCONCLUSIVE), (5, 0, OPPOSITE), (3, 3, INCONCLUSIVE), (0, 0, NOT_TESTABLE)],
)
def test_a_trigger_that_saves_runs_from_collapse(saved: int, lost: int, verdict: str) -> None:
    """Of eight against eight, five against none is the first that is no chance: p = .013, and four have .038."""
    a, b = ([LOST if i < count else None for i in range(8)] for count in (saved, lost))
    arms = evidence(reached("ess", [5] * 8, a), reached("k3", [5] * 8, b))
    found = Rarer("ess, k3").judge(arms)
    assert found.verdict == verdict
    if verdict != NOT_TESTABLE:
        assert found.numbers["reached"] == {"ess": f"{saved} of 8", "k3": f"{lost} of 8"}
        assert found.numbers["only_in"] == {
            "ess": [f"seed {i}" for i in range(lost, saved)], "k3": [f"seed {i}" for i in range(saved, lost)]
        }  # fmt: skip


def test_few_runs_tell_nothing_of_what_is_rare_and_one_arm_has_no_other() -> None:
    few = evidence(reached("ess", [5] * 7, [None] * 7), reached("k3", [5] * 7, [LOST] * 7))
    assert Rarer("ess, k3").judge(few).verdict == INCONCLUSIVE
    assert Rarer("k3").judge(few).verdict == NOT_TESTABLE
