"""The studies that come with vexact: what their table says, and that no claim compares what differs otherwise too."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from vexact.experiments import Study, load_study
from vexact.recipe import leaves

FOLDER = Path(__file__).parents[2] / "studies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "modsum")
# Keys of an objective: two arms that differ in one of them end elsewhere whatever the mismatch is.
OBJECTIVE = ("loss.name", "loss.advantage", "loss.aggregation", "loss.mini_batches", "loss.epsilon_high")
ON_PURPOSE = {("e2", "coding")}  # claims about the objective itself


@pytest.fixture(scope="module")
def studies() -> dict[str, Study]:
    return {name: load_study(FOLDER / f"{name}.yaml") for name in NAMES}


def rows(text: str) -> dict[str, tuple[int, int]]:
    return {name: (int(a), int(b)) for name, a, b in re.findall(r"\| `(\w+)` \|.*\| (\d+) × (\d+) \|", text)}


def test_the_table_of_studies_counts_their_arms_and_seeds(studies: dict[str, Study]) -> None:
    written = rows((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert written == {name: (len(study.arms), len(study.seeds)) for name, study in studies.items()}
    assert rows("| `a` | x | 3 × 5 |") == {"a": (3, 5)}


def mixed(study: Study) -> list[tuple[str, str]]:
    """The claims whose arms, or what they are compared with, differ in their objective."""
    found = []
    for claim in study.claims:
        if claim.rule not in ("gap", "best", "order", "dose-response"):
            continue
        given = [claim.parameters.get(key, "") for key in ("arms", "against", "placebo", "best", "untreated")]
        arms = [arm for patterns in given for arm in study.matching(str(patterns))]
        if claim.rule != "order" and "against" not in claim.parameters:
            beside = {study.reference(arm) for arm in arms}
            arms += [arm for arm in study.arms if arm.role in ("exact", "null") and study.reference(arm) in beside]
        keys = [dict(leaves(asdict(study.recipe(arm)))) for arm in arms]
        if len({tuple(each[key] for key in OBJECTIVE) for each in keys}) > 1:
            found.append((study.name, claim.id))
    return found


def test_what_a_claim_compares_differs_in_its_mismatch_and_not_in_its_objective(studies: dict[str, Study]) -> None:
    assert {each for study in studies.values() for each in mixed(study)} == ON_PURPOSE


def test_rejection_by_either_ratio_is_compared_at_equal_numbers_of_updates(studies: dict[str, Study]) -> None:
    recipes = {arm.name: studies["e4"].recipe(arm) for arm in studies["e4"].matching("four updates *")}
    assert {recipe.loss.mini_batches for recipe in recipes.values()} == {4}
    ratios = {name: recipe.loss.remedy.sequence_ratio for name, recipe in recipes.items() if " RS " in name}
    assert ratios == {f"four updates RS {r} {k}": w for r, w in (("r_corr", "correction"), ("r_ppo", "drift"))
                      for k in ("K1", "K3")}  # fmt: skip


def test_every_teacher_and_coding_of_the_second_study_is_in_a_claim(studies: dict[str, Study]) -> None:
    study = studies["e2"]
    named = {arm.name for claim in study.claims for patterns in claim.parameters.values()
             for arm in study.matching(str(patterns))}  # fmt: skip
    assert {f"{coding} {teacher} head" for coding in ("group", "plain") for teacher in ("moving", "fixed")} <= named


def test_every_study_that_is_judged_by_success_keeps_questions_for_it(studies: dict[str, Study]) -> None:
    for study in studies.values():
        for arm in study.arms:
            recipe = study.recipe(arm)
            assert recipe.eval.items == 0 or recipe.task.held_out > 0, (study.name, arm.name)


def test_an_arm_and_the_exact_one_beside_it_differ_in_their_mismatch_and_not_in_their_objective(
    studies: dict[str, Study],
) -> None:
    """Reports draw their gap."""
    for study in studies.values():
        recipes = {arm.name: dict(leaves(asdict(study.recipe(arm)))) for arm in study.arms}
        for arm in study.arms:
            beside = study.reference(arm)
            assert {k: recipes[arm.name][k] for k in OBJECTIVE} == {k: recipes[beside][k] for k in OBJECTIVE}, arm.name


def test_every_exact_arm_of_the_numbered_studies_has_a_null_arm(studies: dict[str, Study]) -> None:
    for name, study in studies.items():
        nulls = {study.reference(arm) for arm in study.arms if arm.role == "null"}
        exact = {arm.name for arm in study.arms if arm.role == "exact"}
        assert name in ("smoke", "smollm2") or exact == nulls, name
