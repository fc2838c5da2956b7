"""A study file says what it means, or is refused by the name of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vexact.errors import BadInput
from vexact.experiments import load_study
from vexact.experiments.study import Study, split, texts
from vexact.recipe import Recipe

STUDIES = Path(__file__).parents[2] / "studies"
FILES = sorted(path.name for path in STUDIES.glob("*.yaml") if path.name != "modsum.yaml")
BASE = {"model": {"path": "tiny-modsum"}, "task": {"name": "modsum", "options": {"min_terms": 3}}}


def study_of(folder: Path, content: dict[str, Any]) -> Study:
    path = folder / "made.yaml"
    path.write_text(
        yaml.safe_dump({"recipe": BASE, "arms": [{"name": "exact", "role": "exact"}], **content}, sort_keys=False)
    )
    return load_study(path)


@pytest.mark.parametrize("name", FILES)
def test_every_study_of_the_project_can_be_read_and_all_its_arms_have_recipes(name: str) -> None:
    study = load_study(STUDIES / name)
    recipes = [study.recipe(arm, seed) for arm in study.arms for seed in study.seeds[:1]]
    assert all(isinstance(recipe, Recipe) for recipe in recipes)
    assert study.arms[0].role == "exact"
    assert sum(arm.role == "null" for arm in study.arms) >= (2 if name[0] == "e" else 0)
    assert study.claims


def test_the_studies_of_the_issue_are_all_there_and_headline_ones_have_sixteen_seeds() -> None:
    assert {f"e{i}.yaml" for i in range(8)} | {"e1b.yaml", "smoke.yaml"} <= set(FILES)
    seeds = {name: len(load_study(STUDIES / name).seeds) for name in FILES}
    assert {name for name, count in seeds.items() if count >= 16} == {"e1.yaml", "e2.yaml", "e6.yaml"}
    assert len(load_study(STUDIES / "smoke.yaml").arms) * 2 <= 50


def test_a_grid_is_an_arm_for_each_combination_with_names_that_can_be_read(tmp_path: Path) -> None:
    arm = {
        "name": "{kind} {every}",
        "label": "{kind}, sync {every}",
        "overrides": {"delay": 1},
        "grid": {
            "kind": {"slow": {"optimizer": {"lr": 1e-5}}, "fast": {"optimizer.lr": "1e-3"}},
            "sync.every": [1, 16],
        },
    }
    study = study_of(tmp_path, {"arms": [arm]})
    assert [a.name for a in study.arms] == ["slow 1", "slow 16", "fast 1", "fast 16"]
    assert study.arms[1].label == "slow, sync 16"
    recipes = [study.recipe(a) for a in study.arms]
    assert [(r.optimizer.lr, r.sync.every, r.delay) for r in recipes] == [
        (1e-5, 1, 1), (1e-5, 16, 1), (1e-3, 1, 1), (1e-3, 16, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "word"), [(1e-4, "1e-4"), ("2.5e-3", "2.5e-3"), (0.05, "0.05"), (0, "0"), (16, "16")]
)
def test_doses_are_named_as_people_write_them(value: Any, word: str, tmp_path: Path) -> None:
    arm = {"name": "lr", "grid": {"optimizer.weight_decay": [value]}}
    assert study_of(tmp_path, {"arms": [arm]}).arms[0].name == f"lr {word}"


def test_overrides_reach_the_recipe_in_the_order_base_common_arm_and_seed(tmp_path: Path) -> None:
    arms = [{"name": "a"}, {"name": "b", "overrides": {"steps": 9}, "seed_offset": 100}]
    study = study_of(
        tmp_path, {"common": {"steps": 7, "task": {"options": {"modulus": 5}}}, "arms": arms, "seeds": [3, 4]}
    )
    a, b = (study.recipe(arm, study.seeds[0]) for arm in study.arms)
    assert (a.steps, b.steps, a.seed, b.seed) == (7, 9, 3, 103)
    assert a.task.options == {"min_terms": 3, "modulus": 5}
    assert study.with_common({"steps": 1}).recipe().steps == 1


def test_a_base_recipe_lies_beside_the_study(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("steps: 13\n")
    assert study_of(tmp_path, {"recipe": "base.yaml"}).recipe().steps == 13


def test_an_arm_of_a_grid_stands_beside_the_exact_arm_that_its_words_name(tmp_path: Path) -> None:
    exact = [{"name": f"{coding} none", "role": "exact"} for coding in ("group", "plain")]
    grid = {"coding": {"group": {}, "plain": {"loss.advantage": "reward"}}}
    arms = [*exact, {"name": "{coding} head", "beside": "{coding} none", "grid": grid}, {"name": "other"}]
    study = study_of(tmp_path, {"arms": arms})
    assert [study.reference(arm) for arm in study.arms] == ["group none", "plain none"] * 2 + ["group none"]


def test_a_bare_null_is_the_role_of_that_name(tmp_path: Path) -> None:
    assert study_of(tmp_path, {"arms": [{"name": "a", "role": None}]}).arms[0].role == "null"


def test_a_study_that_is_written_resolved_reads_as_the_same(tmp_path: Path) -> None:
    study = load_study(STUDIES / "smoke.yaml")
    (tmp_path / "again.yaml").write_text(study.to_yaml())
    again = load_study(tmp_path / "again.yaml")
    assert [(a.name, a.role, a.beside) for a in again.arms] == [(a.name, a.role, a.beside) for a in study.arms]
    assert [again.recipe(a, 1) for a in again.arms] == [study.recipe(a, 1) for a in study.arms]
    assert (again.claims, again.seeds, again.tail) == (study.claims, study.seeds, study.tail)


TWO = [
    {"name": "exact", "role": "exact"}, {"name": "plain", "role": "exact"}, {"name": "a"},
    {"name": "b", "beside": "plain"},
]  # fmt: skip
CLAIM = {"id": "x", "claim": "c", "rule": "gap", "arms": "exact"}
WITHIN = {"id": "x", "claim": "c", "rule": "within", "arms": "a", "endpoint": "k3_max"}
LEADS = {"id": "x", "claim": "c", "rule": "leads", "arms": "a", "first": "success_falls", "second": "k3_leaves"}
RARER = {"id": "x", "claim": "c", "rule": "rarer", "arms": "a, b"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"arm": []}, "unknown key arm; did you mean arms"),
        ({"arms": [{"name": "a", "override": {}}]}, "arms[0]: unknown key override; did you mean overrides"),
        ({"arms": [{"overrides": {}}]}, "arms[0]: name is missing"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "two arms are called a"),
        ({"arms": [{"name": "a,b"}]}, "has no comma"),
        ({"arms": [{"name": "a", "role": "control"}]}, "role = 'control' is not one of exact, null, arm"),
        ({"arms": [{"name": "a", "overrides": {"sync.evry": 2}}]}, "arm a: sync.evry: unknown key sync.evry; did you"),
        ({"arms": [{"name": "a", "overrides": {"sync.every": 0}}]}, "arm a: sync.every: sync.every = 0 is below 1"),
        ({"arms": [{"name": "{kid}", "grid": {"kind": {"x": {}}}}]}, "may name {kind}"),
        ({"arms": [{"name": "a", "grid": {"sync.every": 3}}]}, "grid.sync.every = 3 is not a list"),
        ({"arms": [{"name": "a"}, {"name": "b", "beside": "a"}]}, "arm b: beside = a: that is no exact arm"),
        ({"arms": [TWO[0], {"name": "b", "role": "exact", "beside": "exact"}]}, "beside = exact: it is exact itself"),
        ({"arms": TWO, "claims": [{**CLAIM, "arms": "a, b"}]}, "beside different exact arms: exact, plain"),
        ({"arms": TWO, "claims": [{**CLAIM, "arms": "a, b", "against": "plain"}]}, "beside different exact arms"),
        ({"arms": TWO, "claims": [{**CLAIM, "arms": "plain"}]}, "arm plain is exact: say what it is compared with"),
        ({"arms": TWO, "claims": [{**WITHIN}]}, "rule within: needs low, high or both"),
        ({"arms": TWO, "claims": [{**WITHIN, "low": 3.0, "high": 1.0}]}, "low = 3 is above high = 1"),
        ({"arms": TWO, "claims": [{**WITHIN, "high": 1.0, "unit": "nobody"}]}, "unit = 'nobody' matches no arm"),
        ({"arms": TWO, "claims": [{**LEADS, "control": "nobody"}]}, "control = 'nobody' matches no arm"),
        ({"arms": TWO, "claims": [{**RARER, "arms": "*"}]}, "is about two arms, and arms = '*' matches 4"),
        ({"arms": TWO, "claims": [{**RARER, "endpoint": "k3_max"}]}, "endpoint = k3_max is not one of collapse_step"),
        ({"common": {"stepps": 3}}, "unknown key stepps; did you mean steps"),
        ({"seeds": 0}, "seeds = 0 is neither a count nor a list"),
        ({"seeds": [1, 1]}, "names a seed twice"),
        ({"warm_start": "none"}, "warm_start = 'none' is not one of shared, per_seed"),
        ({"rollouts": {"seed": "all"}}, "rollouts: unknown key seed; did you mean seeds"),
        ({"tail": 0}, "tail = 0 is not an integer of at least 1"),
        ({"claims": [{**CLAIM, "rule": "gaps"}]}, "rule = 'gaps' is not one of"),
        ({"claims": [{**CLAIM, "endpont": "k3_max"}]}, "unknown option endpont; did you mean endpoint"),
        ({"claims": [{**CLAIM, "endpoint": "k3"}]}, "endpoint = k3 is not one of final_trainer"),
        ({"claims": [{**CLAIM, "arms": "sampler *"}]}, "claim x: arms = 'sampler *' matches no arm"),
        ({"claims": [{**CLAIM, "expect": "worse"}]}, "expect = worse is not one of lower, higher, none"),
        ({"claims": [{**CLAIM, "rule": "always"}]}, "rule always needs endpoint"),
        ({"claims": [{**CLAIM, "margin": "wide"}]}, "margin = 'wide' is not a number"),
        ({"claims": [{"id": "x", "claim": "c"}]}, "claims[0]: rule is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(content: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        study_of(tmp_path, content)
    assert words in str(caught.value) and "made.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    for text, words in [("a: [", "is not YAML"), ("- 1", "holds list"), ("title: x", "recipe is missing")]:
        (tmp_path / "no.yaml").write_text(text)
        with pytest.raises(BadInput, match=words):
            load_study(tmp_path / "no.yaml")
    with pytest.raises(BadInput, match="no such file"):
        load_study(tmp_path / "nowhere.yaml")


def test_values_become_the_text_of_a_command_line() -> None:
    assert texts({"a": 1e-6, "b": "off", "c": True, "d": ["x", "y"]}) == {
        "a": "1.0e-06", "b": "'off'", "c": "true", "d": "[x, y]",
    }  # fmt: skip
    assert split(" a b, c ,") == ["a b", "c"]
