"""Each rule gives each verdict where it should, on runs that were made up for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from vexact.experiments.bits import Always, EqualBits
from vexact.experiments.claims import RULES, Best, DoseResponse, Gap, Order, Within
from vexact.experiments.evidence import ArmEvidence, Evidence
from vexact.experiments.gaps import gaps, null_band
from vexact.experiments.judge import judged
from vexact.experiments.steps import Together
from vexact.experiments.study import ClaimSpec, Study
from vexact.experiments.verdict import CONFIRMED, FEW, INCONCLUSIVE, NOT_TESTABLE, OPPOSITE

NOISE = (-0.04, -0.02, 0.0, 0.01, 0.03, 0.02, -0.01, 0.01)


def around(value: float, seeds: int = 8) -> list[float | None]:
    return [value + NOISE[i % len(NOISE)] for i in range(seeds)]


def arm(
    name: str, values: Sequence[float | None], role: str = "arm", endpoint: str = "late_trainer", **more: Any
) -> ArmEvidence:
    return ArmEvidence(name, role, range(len(values)), {endpoint: values}, **more)


def evidence(*arms: ArmEvidence) -> Evidence:
    return Evidence({each.name: each for each in arms})


EXACT = arm("exact", around(0.8), "exact")
NULL = arm("other draws", around(0.77), "null")


def test_a_gap_counts_only_outside_the_null_arms() -> None:
    below = arm("sampler", around(0.6))
    low, high = null_band(evidence(EXACT, NULL, below), "sampler", "late_trainer")
    assert low == pytest.approx(-0.03) and high == 0.0
    found = gaps(evidence(EXACT, NULL, below), "sampler", "late_trainer")
    assert found.sign(found.of["sampler"]) == -1
    wide = arm("flipped", around(0.55), "null")  # chance alone does as much
    found = gaps(evidence(EXACT, wide, below), "sampler", "late_trainer")
    assert found.sign(found.of["sampler"]) == 0


@pytest.mark.parametrize(
    ("value", "expect", "verdict"),
    [
        (0.5, "lower", CONFIRMED), (0.8, "lower", INCONCLUSIVE), (1.0, "lower", OPPOSITE),
        (1.0, "higher", CONFIRMED), (0.5, "higher", OPPOSITE),
        (0.8, "none", CONFIRMED), (0.5, "none", OPPOSITE), (0.75, "none", INCONCLUSIVE), (0.68, "none", OPPOSITE),
    ],
)  # fmt: skip
def test_a_gap_is_judged_by_its_sign(value: float, expect: str, verdict: str) -> None:
    rule = Gap("sampler", expect=expect)
    assert rule.judge(evidence(EXACT, NULL, arm("sampler", around(value)))).verdict == verdict


def test_no_difference_is_not_shown_by_an_interval_that_is_wide() -> None:
    loose = arm("sampler", [0.5, 1.1, 0.6, 1.0, 0.9, 0.7, 0.8, 0.8])
    assert Gap("sampler", expect="none").judge(evidence(EXACT, NULL, loose)).verdict == INCONCLUSIVE


def test_no_difference_is_not_shown_by_chance_that_is_wide() -> None:
    """A null arm that is far off by chance says that nothing can be told, not that arms near it are equal."""
    far, near = arm("other draws", around(0.5), "null"), arm("sampler", around(0.6))
    assert Gap("sampler", expect="none").judge(evidence(EXACT, far, near)).verdict == INCONCLUSIVE
    assert Gap("sampler", expect="none", margin=0.3).judge(evidence(EXACT, far, near)).verdict == CONFIRMED


def test_few_seeds_give_numbers_and_no_verdict() -> None:
    few = [arm("exact", around(0.8, FEW - 1), "exact"), arm("sampler", around(0.1, FEW - 1))]
    for rule in (Gap("sampler"), Within("sampler", "late_trainer", high=1.0), Order("sampler, exact", "late_trainer")):
        found = rule.judge(evidence(*few))
        assert found.verdict == INCONCLUSIVE and found.numbers["seeds"] == FEW - 1 == 7


def test_all_and_any_of_several_arms() -> None:
    arms = evidence(EXACT, NULL, arm("s 1", around(0.8)), arm("s 2", around(0.4)))
    assert Gap("s *", which="all").judge(arms).verdict == INCONCLUSIVE
    assert Gap("s *", which="any").judge(arms).verdict == CONFIRMED


def test_one_of_many_arms_has_to_be_farther_off_than_one_alone() -> None:
    """Of ten arms that differ by chance alone one is soon found to differ."""
    odd = arm("s 0", around(0.777))
    others = [arm(f"s {i}", around(0.8)) for i in range(1, 10)]
    assert Gap("s 0").judge(evidence(EXACT, odd)).verdict == CONFIRMED
    assert Gap("s *", which="any").judge(evidence(EXACT, odd, *others)).verdict == INCONCLUSIVE
    assert Gap("s *", expect="higher").judge(evidence(EXACT, odd, *others)).verdict == INCONCLUSIVE
    assert Gap("s 0", expect="higher").judge(evidence(EXACT, odd)).verdict == OPPOSITE


def test_a_claim_may_have_an_exact_arm_and_null_arms_of_its_own() -> None:
    """Another coding of rewards ends elsewhere without any mismatch."""
    own = "plain exact"
    plain = [
        arm("plain exact", around(0.5), "exact"),
        arm("plain draws", around(0.45), "null", beside=own),
        arm("plain head", around(0.4), beside=own),
    ]
    arms = evidence(EXACT, NULL, *plain)
    found = Gap("plain head").judge(arms)
    assert found.numbers["gaps"]["plain head"]["value"] == pytest.approx(-0.1)
    assert found.numbers["null_band"] == [pytest.approx(-0.05), 0.0]
    assert Gap("other draws").judge(arms).numbers["null_band"] == [pytest.approx(-0.03), 0.0]
    best = Best("plain head, plain draws", "plain draws", "plain head")
    assert best.judge(arms).numbers["gaps"]["plain draws"]["value"] == pytest.approx(-0.05)
    treated = [replace(each, beside=own) for each in doses("sampler", {0.01: 0.5, 0.1: 0.44})]
    numbers = (
        DoseResponse("sampler *", "shared *")
        .judge(evidence(EXACT, NULL, *plain, *treated, *doses("shared", {0.01: 0.5, 0.1: 0.5})))
        .numbers
    )
    assert numbers["null_band"] == [pytest.approx(-0.05), 0.0]


def test_a_gap_to_another_arm_keeps_the_null_band_of_the_exact_one() -> None:
    arms = evidence(EXACT, NULL, arm("dlc", around(0.6)), arm("resync", around(0.6)))
    found = Gap("resync", against="dlc", expect="none").judge(arms)
    assert found.verdict == CONFIRMED
    assert found.numbers["null_band"][0] == pytest.approx(-0.03)


def test_two_exact_arms_that_are_compared_have_the_null_arms_of_both() -> None:
    fixed = [arm("fixed none", around(0.7), "exact"), arm("fixed draws", around(0.68), "null", beside="fixed none")]
    wide = arm("moving draws", around(0.6), "null", beside="exact")
    found = Gap("fixed none", against="exact").judge(evidence(EXACT, wide, *fixed))
    assert found.verdict == INCONCLUSIVE and found.numbers["null_band"] == [pytest.approx(-0.2), 0.0]
    near = arm("moving draws", around(0.78), "null", beside="exact")
    assert Gap("fixed none", against="exact").judge(evidence(EXACT, near, *fixed)).verdict == CONFIRMED


def test_a_unit_that_may_be_nothing_measures_nothing() -> None:
    for unit in ([0.0] * 8, [0.0] * 7 + [1.0], [-1.0] * 8):
        arms = evidence(arm("exact", unit, "exact"), arm("a", around(1.6)))
        assert Within("a", "late_trainer", high=2.0, unit="exact").judge(arms).verdict == NOT_TESTABLE


def test_what_nobody_measured_is_not_testable() -> None:
    bare = evidence(EXACT, arm("sampler", around(0.5)))
    for rule in (
        Gap("sampler", endpoint="drift"),
        Always("sampler", "delta_max"),
        Within("sampler", "drift", high=1.0),
        Order("sampler, exact", "drift"),
        EqualBits("sampler", "nobody"),
        Together("sampler"),
        DoseResponse("sampler", "exact"),
        Best("sampler", "nobody", "sampler"),
    ):
        assert rule.judge(bare).verdict == NOT_TESTABLE, rule


def printed(name: str, *prints: str) -> ArmEvidence:
    return ArmEvidence(name, "arm", range(len(prints)), {}, prints)


def test_bits_are_equal_or_not_and_one_seed_is_enough() -> None:
    off, same, other = printed("off", "a", "b"), printed("zero", "a", "b"), printed("torch", "a", "c")
    arms = evidence(off, same, other)
    assert EqualBits("zero", "off").judge(arms).verdict == CONFIRMED
    found = EqualBits("torch", "off").judge(arms)
    assert found.verdict == OPPOSITE and found.numbers["different"] == ["torch, seed 1"]
    assert EqualBits("torch", "off", "different").judge(arms).verdict == OPPOSITE  # seed 0 is equal
    assert EqualBits("torch", "off", "different").judge(evidence(off, printed("torch", "x", "y"))).verdict == CONFIRMED


def compared(
    name: str, values: Sequence[float | None], tokens: Sequence[int] = (9, 9), lost: Sequence[int] = (0, 0)
) -> ArmEvidence:
    ends = {"delta_max": values, "compared": list(tokens), "not_finite": list(lost)}
    return ArmEvidence(name, "arm", range(len(values)), ends)


def test_a_value_of_tokens_says_nothing_where_none_were_compared() -> None:
    idle, half = compared("a", [0.0, 0.0], (0, 0)), compared("a", [0.0, 0.0], (9, 0))
    assert Always("a", "delta_max").judge(evidence(idle)).verdict == NOT_TESTABLE
    found = Always("a", "delta_max").judge(evidence(half))
    assert (found.verdict, found.numbers["runs_without_comparison"], found.numbers["tokens"]) == (INCONCLUSIVE, 1, 9)
    control = compared("a", [1.0, 0.0], (9, 0))
    assert Always("a", "delta_max", expect="none").judge(evidence(control)).verdict == INCONCLUSIVE


@pytest.mark.parametrize("values", [(0.0, 0.0), (0.0, None)])
def test_a_difference_that_is_no_number_is_a_difference(values: Sequence[float | None]) -> None:
    broken = compared("a", values, lost=(0, 3))
    found = Always("a", "delta_max").judge(evidence(broken))
    assert (found.verdict, found.numbers["not_finite"]) == (OPPOSITE, 1)
    assert Always("a", "delta_max", value=1.0, expect="none").judge(evidence(broken)).verdict == INCONCLUSIVE


def test_a_value_is_always_there_or_never() -> None:
    arms = evidence(compared("exact", [0.0, 0.0]), compared("torch", [0.0, 1e-7]))
    assert Always("exact", "delta_max").judge(arms).verdict == CONFIRMED
    assert Always("torch", "delta_max").judge(arms).verdict == OPPOSITE
    assert Always("torch", "delta_max", expect="none").judge(arms).verdict == OPPOSITE
    late = arm("late", [80, None], endpoint="parted")
    assert Always("late", "parted", 80.0).judge(evidence(late)).verdict == OPPOSITE


def doses(side: str, by_dose: Mapping[float, float]) -> list[ArmEvidence]:
    return [arm(f"{side} {d:g}", around(v), overrides={"mismatch.k3": d}) for d, v in by_dose.items()]


RESPONSE = DoseResponse("sampler *", "shared *")
FLAT = doses("shared", {0.001: 0.8, 0.01: 0.79, 0.1: 0.78})


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.8, 0.7, 0.3), CONFIRMED),
        ((0.8, 0.8, 0.79), INCONCLUSIVE),
        ((0.8, 0.85, 1.0), OPPOSITE),
        ((0.3, 0.75, 0.5), INCONCLUSIVE),  # harm, but less of it at ten times the dose
    ],
)
def test_harm_must_grow_with_the_dose(values: tuple[float, ...], verdict: str) -> None:
    treated = doses("sampler", dict(zip((0.001, 0.01, 0.1), values, strict=True)))
    assert RESPONSE.judge(evidence(EXACT, NULL, *FLAT, *treated)).verdict == verdict


def test_noise_that_harms_on_both_sides_alike_is_no_harm_of_mismatch() -> None:
    """Against the exact arm it would be: the placebo is what tells them apart."""
    low = {0.001: 0.8, 0.01: 0.6, 0.1: 0.3}
    found = RESPONSE.judge(evidence(EXACT, NULL, *doses("shared", low), *doses("sampler", low)))
    assert found.verdict == INCONCLUSIVE
    assert Gap("sampler 0.1").judge(evidence(EXACT, NULL, *doses("sampler", low))).verdict == CONFIRMED


@pytest.mark.parametrize(("free", "verdict"), [("as many", CONFIRMED), ("twice as many", INCONCLUSIVE)])
def test_a_claim_that_needs_another_stands_with_it(free: str, verdict: str) -> None:
    ends: dict[str, Sequence[float | None]] = {"late_trainer": around(0.5), "syncs": [10.0] * 8}
    arms = evidence(
        ArmEvidence("fixed", "arm", range(8), {**ends, "syncs": [10.0 if free == "as many" else 20.0] * 8}),
        ArmEvidence("ess", "arm", range(8), {**ends, "late_trainer": around(0.7)}),
    )
    claims = (
        ClaimSpec("even", "even", "matched", {"arms": "fixed, ess"}),
        ClaimSpec("B5", "higher", "order", {"arms": "fixed, ess", "endpoint": "late_trainer"}, needs="even"),
    )
    study = Study("made.yaml", "made", "", "", {}, {}, (), claims, (0,))
    even, found = judged(study, arms)
    assert even["verdict"] == (CONFIRMED if free == "as many" else OPPOSITE)
    assert found["verdict"] == verdict and "'even'" in found["rule"]
    assert found["numbers"].get("needs") == (None if free == "as many" else {"even": OPPOSITE})


def test_an_order_is_that_of_the_names() -> None:
    a, b, c = arm("a", around(0.1)), arm("b", around(0.5)), arm("c", around(0.5))
    assert Order("a, b", "late_trainer").judge(evidence(a, b)).verdict == CONFIRMED
    assert Order("b, a", "late_trainer").judge(evidence(a, b)).verdict == OPPOSITE
    assert Order("b, c", "late_trainer").judge(evidence(b, c)).verdict == INCONCLUSIVE


@pytest.mark.parametrize(
    ("best", "other", "untreated", "verdict"),
    [
        (0.78, 0.5, 0.3, CONFIRMED),
        (0.5, 0.79, 0.3, OPPOSITE),  # it mends, but another one comes nearer
        (0.2, 0.3, 0.4, OPPOSITE),
        (0.78, 0.79, 0.3, INCONCLUSIVE),  # no telling which is nearer
        (0.79, 0.78, 0.3, INCONCLUSIVE),  # nor is it told by a point that is nearer by a little
        (0.79, 0.75, 0.3, INCONCLUSIVE),  # … or by as little as chance leaves between any two
        (0.8, 0.8, 0.8, NOT_TESTABLE),  # nothing was to be mended
    ],
)
def test_the_best_remedy(best: float, other: float, untreated: float, verdict: str) -> None:
    arms = evidence(
        EXACT, NULL, arm("r dlc", around(best)), arm("r tis", around(other)), arm("r none", around(untreated))
    )
    found = Best("r *", "r dlc", "r none").judge(arms)
    assert found.verdict == verdict
    assert found.numbers["ranking"] == sorted(
        found.numbers["gaps"], key=lambda name: abs(found.numbers["gaps"][name]["value"])
    )


def test_a_bound_is_kept_or_broken() -> None:
    arms = evidence(arm("a", around(1.5)))
    verdicts = [Within("a", "late_trainer", high=bound).judge(arms).verdict for bound in (2.0, 1.5, 1.0)]
    assert verdicts == [CONFIRMED, INCONCLUSIVE, OPPOSITE]
    verdicts = [Within("a", "late_trainer", low=bound).judge(arms).verdict for bound in (1.0, 1.5, 2.0)]
    assert verdicts == [CONFIRMED, INCONCLUSIVE, OPPOSITE]
    assert Within("a", "late_trainer", 1.4, 1.6).judge(arms).verdict == CONFIRMED
    assert "at least 1.4 and at most 1.6" in Within("a", "late_trainer", 1.4, 1.6).text()


def test_a_unit_of_a_few_runs_makes_a_bound_less_sure() -> None:
    """Six tenths of the bound in exact units; the unit's own runs lie a factor of four apart."""
    wide = arm("exact", [0.4, 1.6] * 4, "exact")
    arms = evidence(wide, arm("a", around(1.6)))
    assert Within("a", "late_trainer", high=2.0).judge(arms).verdict == CONFIRMED
    found = Within("a", "late_trainer", high=2.0, unit="exact").judge(arms)
    assert found.verdict == INCONCLUSIVE and found.numbers["means"]["a"]["value"] == pytest.approx(1.6)
    assert Within("a", "late_trainer", high=2.0, unit="nobody").judge(arms).verdict == NOT_TESTABLE
    few = Within("a", "late_trainer", high=9.0, unit="few").judge(evidence(arm("few", [1.0] * 7), arms.arms["a"]))
    assert few.verdict == INCONCLUSIVE and few.numbers["seeds"] == 7
    assert "units of that of exact" in Within("a", "late_trainer", high=2.0, unit="exact").text()


def test_every_rule_says_itself_in_words() -> None:
    given: dict[str, Any] = {
        "arms": "a",
        "against": "b",
        "placebo": "b",
        "best": "a",
        "untreated": "b",
        "endpoint": "drift",
        "bound": 2.0,
        "first": "ess_below_half",
        "second": "collapse_step",
    }
    for kind in RULES.values():
        needed = {name: given[name] for name in given if name in kind.__dataclass_fields__}
        assert len(kind(**needed).text()) > 20


def test_a_step_that_was_not_reached_is_later_than_all_steps() -> None:
    late = arm("a", [3, None], endpoint="collapse_step")
    assert late.values("collapse_step") == [3.0, math.inf]
    assert gaps(evidence(EXACT, late), "a", "collapse_step").of == {}
