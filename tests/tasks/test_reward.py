"""Reward functions of others: found by module or file, called as TRL or as verl calls them."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vexact.recipe import RewardSection, TaskSection
from vexact.tasks import Answer, Item, TaskError, load_task
from vexact.tasks.reward import load_reward

TRL = """
    calls = []
    def score(prompts, completions, **columns):
        calls.append({"prompts": prompts, "completions": completions, **columns})
        return [float(len(completion)) for completion in completions]
    def narrow(completions, solution):
        return [float(c == s) for c, s in zip(completions, solution)]
    def scaled(completions, scale=1.0, **columns):
        return [scale * len(completion) for completion in completions]
    class Judge:
        def __call__(self, completions, solution, **columns):
            return [float(c == s) for c, s in zip(completions, solution)]
    judge = Judge()
"""
VERL = """
    calls = []
    def score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)
    def small(solution_str, ground_truth):
        return solution_str == ground_truth
    def mapped(data_source, solution_str, ground_truth, extra_info=None, weight=1.0, **others):
        return {"score": weight * (solution_str == ground_truth), "acc": True}
    async def later(solution_str, **others):
        return 1.0
    def anything(*arguments, **others):
        return [0.5 for _ in others["completions"]] if "completions" in others else 0.25
    number = 3
"""
ITEMS = [
    Item(0, "a", "4", columns={"solution": "4", "level": 1}),
    Item(1, "b", "5", columns={"solution": "5"}),
]
ANSWERS = [Answer(ITEMS[0], "4", 7, 0, (1, 2)), Answer(ITEMS[1], "44", 8, 3, (3,))]
IN_VERLS_FORM = Item(
    4,
    ({"role": "user", "content": "a"},),
    "4",
    columns={"data_source": "gsm8k", "reward_model": {"ground_truth": 4}, "extra_info": {"index": 9}},
)


@pytest.fixture(params=["file", "module"])
def named(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a source, give what a recipe calls it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        name = f"own_{tmp_path.parent.name}_{tmp_path.name}_{len(source)}".replace("-", "_")
        importlib.invalidate_caches()
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name if request.param == "module" else f"{tmp_path}/{name}.py"

    return write


def load(function: str, **keys: Any) -> Any:
    task = load_task(TaskSection(name="modsum"), 0)
    return load_reward(RewardSection(function=function, **keys), task, "modsum")


def scored(reward: Any, answers: Sequence[Answer] = ANSWERS) -> list[Any]:
    values: dict[int, Any] = {}
    for positions, call in reward.calls(answers):
        values.update(zip(positions, call(), strict=True))
    return [values[i] for i in range(len(answers))]


def noted(reward: Any) -> Any:
    return reward._function.__globals__["calls"]


def test_trls_function_gets_lists_and_every_column(named: Any) -> None:
    reward = load(f"{named(TRL)}:score")
    assert len(reward.calls(ANSWERS)) == 1
    assert scored(reward) == [1.0, 2.0]
    assert noted(reward) == [
        {
            "prompts": ["a", "b"],
            "completions": ["4", "44"],
            "completion_ids": [[1, 2], [3]],
            "solution": ["4", "5"],
            "level": [1, None],
            "answer": ["4", "5"],
        }
    ]
    assert reward.calls([]) == []


def test_trls_function_gets_a_chats_completions_as_messages(named: Any) -> None:
    reward = load(f"{named(TRL)}:score")
    scored(reward, [Answer(IN_VERLS_FORM, "4", 0, 0)])
    assert noted(reward)[0]["prompts"] == [[{"role": "user", "content": "a"}]]
    assert noted(reward)[0]["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_a_function_without_further_keywords_gets_what_it_names(named: Any) -> None:
    source = named(TRL)
    assert scored(load(f"{named(VERL)}:small")) == [True, False]
    assert scored(load(f"{source}:narrow")) == scored(load(f"{source}:judge")) == [1.0, 0.0]


def test_verls_function_gets_one_completion_a_call(named: Any) -> None:
    reward = load(f"{named(VERL)}:score")
    assert scored(reward, [*ANSWERS, Answer(IN_VERLS_FORM, "4", 0, 0)]) == [
        1.0,
        0.0,
        0.0,
    ]  # 4 is not "4": it is as given
    assert noted(reward) == [
        ("modsum", "4", "4", {"solution": "4", "level": 1, "index": 0}),
        ("modsum", "44", "5", {"solution": "5", "index": 1}),
        ("gsm8k", "4", 4, {"index": 9}),
    ]


def test_options_are_further_arguments_and_a_mapping_holds_its_score(named: Any) -> None:
    assert scored(load(f"{named(TRL)}:scaled", options={"scale": 3})) == [3, 6]
    assert scored(load(f"{named(VERL)}:mapped", options={"weight": 2})) == [2, 0]
    with pytest.raises(TaskError, match=r"unknown option solutions; did you mean solution\?$"):
        load(f"{named(TRL)}:narrow", options={"solutions": 2})


def test_the_signature_can_be_said_where_it_cannot_be_seen(named: Any) -> None:
    source = named(VERL)
    assert scored(load(f"{source}:anything", signature="trl")) == [0.5, 0.5]
    assert scored(load(f"{source}:anything", signature="verl")) == [0.25, 0.25]
    with pytest.raises(
        TaskError, match=r"anything: names neither completions nor solution_str; say task\.reward\.signature"
    ):
        load(f"{source}:anything")


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "score.py").write_text(f"def f(completions):\n    return [{value} for _ in completions]\n")
    first, second = load(f"{tmp_path}/a/score.py:f"), load(f"{tmp_path}/b/score.py:f")
    assert (scored(first), scored(second)) == ([1.0, 1.0], [2.0, 2.0])
    modules = [sys.modules[reward._function.__module__].__file__ for reward in (first, second)]
    assert modules == [f"{tmp_path}/a/score.py", f"{tmp_path}/b/score.py"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("score", "task.reward.function = 'score': must be module:function or file.py:function"),
        (":score", "task.reward.function = ':score': must be module:function"),
        ("no/where.py:score", "task.reward.function: no/where.py: no such file"),
        ("no_such_module:score", "task.reward.function no_such_module:score: no_such_module cannot be imported (Mod"),
        ("{}:scores", "task.reward.function {}:scores: {} has no function scores"),
        ("{}:number", "task.reward.function {}:number: {} has no function number"),
        ("{}:later", "task.reward.function {}:later: is asynchronous, must be an ordinary function"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_had_is_named(function: str, message: str, named: Any) -> None:
    source = named(VERL)
    with pytest.raises(TaskError) as caught:
        load(function.format(source))
    assert str(caught.value).startswith(message.format(source, source))


def test_a_file_that_raises_when_imported_is_named(named: Any) -> None:
    with pytest.raises(TaskError, match=r"cannot be imported \(ZeroDivisionError: division by zero\)$"):
        load(f"{named('1 / 0')}:score")


def test_keys_of_a_function_need_one() -> None:
    for key, value in (("signature", "trl"), ("options", {"a": 1})):
        with pytest.raises(TaskError, match=f"^task.reward.{key} is of a function: task.reward.function is empty$"):
            load("", **{key: value})


@pytest.mark.parametrize(
    ("completion", "truth", "expected"),
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1.0),
        ("The answer is 1/2.", "\\frac{1}{2}", 1.0),
        ("$\\boxed{x^2 + 2x + 1}$", "(x+1)^2", 1.0),
        ("$\\boxed{x^2 + 2x}$", "(x+1)^2", 0.0),
        ("$x^2+3$", "$x^2+3$", 1.0),
        ("it is 3", "x^2+3", 0.0),
        ("$(3,4)$", "(3, 4)", 1.0),
        ("4", "(3, 4)", 0.0),
        ("I do not know", "7", 0.0),
    ],
)
def test_math_verify_judges_mathematics(completion: str, truth: str, expected: float) -> None:
    answer = Answer(Item(0, "q", truth), completion, 0, 0)
    assert scored(load("math_verify"), [answer]) == [expected]


def test_a_truth_that_is_no_mathematics_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        scored(load("math_verify"), [Answer(Item(0, "q", ""), "", 0, 0)])


def test_math_verify_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "vexact.tasks.mathematics", raising=False)
    with pytest.raises(TaskError, match=r"^math_verify needs the package math-verify: pip install 'math-verify\["):
        load("math_verify")
