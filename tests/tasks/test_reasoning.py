"""Questions are a function of seed and position, and only an exact first line is rewarded."""

from __future__ import annotations

import sys

import pytest

from vexact.recipe import TaskSection
from vexact.tasks import TaskError, load_task
from vexact.tasks.reasoning import ITEMS


def test_the_prompt_shows_solved_examples_and_ends_with_the_question() -> None:
    item = load_task(TaskSection(shots=4), seed=0).item(0)
    assert item.prompt.count("Q: ") == 5
    assert item.prompt.endswith("=\nA:")
    *examples, question = item.prompt.split("\n\n")
    assert len(examples) == 4
    for example in examples:
        asked, _, answer = example.partition("\nA: ")
        assert int(answer) == eval(asked.rpartition(": ")[2].removesuffix("="))
    assert int(item.answer) == eval(question.removesuffix("=\nA:").rpartition(": ")[2])


def test_an_item_is_a_function_of_seed_and_position() -> None:
    section = TaskSection()
    first, again, other = load_task(section, 3), load_task(section, 3), load_task(section, 4)
    indices = [5, 0, 40, ITEMS - 1]
    items = [first.item(i) for i in indices]
    assert [again.item(i) for i in reversed(indices)] == items[::-1]
    assert [first.item(i).prompt for i in range(20)] != [other.item(i).prompt for i in range(20)]
    assert [first.item(i).prompt for i in range(1, 20)] != [other.item(i).prompt for i in range(19)]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" {}\n", 1.0),
        ("{}", 1.0),
        (" {} \nQ: more", 1.0),
        (" 1{}\n", 0.0),
        (" {} apples\n", 0.0),
        ("\n{}", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_answer_in_the_first_line_is_rewarded(completion: str, reward: float) -> None:
    task = load_task(TaskSection(), 0)
    item = task.item(1)
    assert task.reward(item, completion.format(item.answer)) == reward


def test_a_position_outside_the_list_is_refused() -> None:
    task = load_task(TaskSection(), 0)
    for index in (-1, ITEMS):
        with pytest.raises(IndexError, match="outside"):
            task.item(index)


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"^task chain_sum needs the package reasoning-gym: pip install reasoning-gym$"):
        load_task(TaskSection(), 0)
