"""Questions are a function of seed, split and position; sums want an exact first line, others the library's scorer."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest

from vexact.recipe import TaskSection
from vexact.tasks import TaskError, load_task
from vexact.tasks.task import ITEMS

with warnings.catch_warnings():  # its needs hold invalid escapes, which Python mentions where it compiles them
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym


def chain_sum(seed: int = 0, held_out: float = 0.0, **options: Any) -> Any:
    return load_task(TaskSection(options=options, held_out=held_out), seed)


def gym(name: str, seed: int = 0, **options: Any) -> Any:
    return load_task(TaskSection(name=name, options=options), seed)


def test_the_prompt_shows_solved_examples_and_ends_with_the_question() -> None:
    item = chain_sum(shots=4).item(0)
    assert item.prompt.count("Q: ") == 5
    assert item.prompt.endswith("=\nA:")
    *examples, question = item.prompt.split("\n\n")
    assert len(examples) == 4
    for example in examples:
        asked, _, answer = example.partition("\nA: ")
        assert int(answer) == eval(asked.rpartition(": ")[2].removesuffix("="))
    assert int(item.answer) == eval(question.removesuffix("=\nA:").rpartition(": ")[2])


def test_an_item_is_a_function_of_seed_and_position() -> None:
    first, again, other = chain_sum(3), chain_sum(3), chain_sum(4)
    indices = [5, 0, 40, ITEMS - 1]
    items = [first.item(i) for i in indices]
    assert [again.item(i) for i in reversed(indices)] == items[::-1]
    assert [first.item(i).prompt for i in range(20)] != [other.item(i).prompt for i in range(20)]
    assert [first.item(i).prompt for i in range(1, 20)] != [other.item(i).prompt for i in range(19)]


def test_terms_and_digits_are_options() -> None:
    question = chain_sum(terms=3, digits=2, shots=0).item(0).columns["question"]
    terms = question.rpartition(": ")[2].removesuffix(" =").replace("+", "-").split("-")
    assert len(terms) == 3 and all(len(term.strip()) == 2 for term in terms)


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
    task = chain_sum()
    item = task.item(1)
    assert task.reward(item, completion.format(item.answer)) == reward


def test_the_solution_is_what_is_rewarded() -> None:
    task = chain_sum()
    for i in range(20):
        assert task.reward(task.item(i), task.item(i).solution) == 1.0
        assert task.item(i).solution.endswith(task.stop)


def test_no_held_out_sum_is_trained_on_or_shown_as_an_example() -> None:
    """One-digit sums of two terms: 200 questions, so that independent draws would meet at once."""
    seen = [chain_sum(seed, 0.2, shots=4).item(i) for seed in (0, 1) for i in range(300)]
    trained = {item.columns["question"] for item in seen}
    shown = {asked.partition("\n")[0] for item in seen[::300] for asked in item.prompt.split("Q: ")[1:-1]}
    held_out = {chain_sum(7, 0.2).item(i, "held_out").columns["question"] for i in range(100)}
    assert len(trained) > 100 and len(held_out) > 20
    assert trained & held_out == set()
    assert len(shown) > 4 and shown & held_out == set()
    free = {chain_sum(0).item(i).columns["question"] for i in range(300)}
    assert free & held_out  # the control: without the split they do meet


@pytest.mark.parametrize("name", ["countdown", "leg_counting", "gsm_symbolic", "pool_matrix", "list_functions"])
def test_any_task_of_the_library_is_had_by_its_name(name: str) -> None:
    """Among them one that makes all its items at once, one that takes 32-bit seeds only."""
    task, again, other = gym(name, 2**63 - 1), gym(name, 2**63 - 1), gym(name, 5)
    indices = [3, 0, 511, 512, ITEMS - 1]
    items = [task.item(i) for i in indices]
    assert [again.item(i) for i in reversed(indices)] == items[::-1]
    assert [task.item(i).prompt for i in range(4)] != [task.item(512 + i).prompt for i in range(4)]  # another block
    assert [item.prompt for item in items] != [other.item(i).prompt for i in indices]
    for item in items:
        assert task.reward(item, f"so <answer>{item.answer}</answer>") == 1.0
        assert task.reward(item, "<answer>no idea</answer>") < 1.0


def test_the_librarys_scorer_decides_and_may_give_part_of_a_point() -> None:
    task = gym("reasoning_gym:chain_sum")
    item = task.item(0)
    completion = f"1{item.answer}"
    entry = dict(item.columns)
    expected = reasoning_gym.create_dataset("chain_sum").score_answer(completion, entry)
    assert 0.0 < expected < 1.0
    assert task.reward(item, completion) == task.reward(item, f"<answer>1</answer><answer> {completion}</answer>")
    assert task.reward(item, completion) == expected
    assert chain_sum().reward(item, completion) == 0.0  # the project's own is strict


def test_options_reach_the_library() -> None:
    assert len(gym("countdown", min_numbers=3, max_numbers=3).item(0).columns["metadata"]["numbers"]) == 3


def test_a_stop_is_the_recipes_for_tasks_that_have_none() -> None:
    assert load_task(TaskSection(name="countdown", stop="</answer>"), 0).stop == "</answer>"
    assert gym("countdown").stop == ""
    with pytest.raises(TaskError, match=r"^task\.stop: chain_sum has its own, '\\n'$"):
        load_task(TaskSection(stop="x"), 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_summ", {}, "task.name: unknown task chain_summ; did you mean chain_sum?"),
        ("coutdown", {}, "task.name: unknown task coutdown; did you mean countdown?"),
        ("countdown", {"min_number": 3}, "task.options of countdown: unknown option min_number; did you mean min_num"),
        ("countdown", {"size": 3}, "task.options of countdown: unknown option size; "),
        ("countdown", {"min_numbers": 0}, "task countdown: reasoning-gym refuses its options (min_numbers must be"),
        ("countdown", {"min_numbers": "x"}, "task countdown: reasoning-gym refuses its options ("),
        ("chain_sum", {"term": 3}, "task.options: unknown option term; did you mean terms?"),
        ("chain_sum", {"terms": "two"}, "task.options.terms = 'two' is not an integer"),
        ("chain_sum", {"terms": True}, "task.options.terms = True is not an integer"),
        ("chain_sum", {"shots": -1}, "task.options.shots = -1 is outside 0 … 1024"),
    ],
)  # fmt: skip
def test_what_the_task_does_not_know_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        gym(name, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_without_a_share_nothing_is_held_out() -> None:
    with pytest.raises(TaskError, match=r"^task\.held_out is 0: no questions are kept for evaluation$"):
        chain_sum().item(0, "held_out")
    with pytest.raises(ValueError, match="split is 'test'"):
        chain_sum().item(0, "test")


def test_a_position_outside_the_list_is_refused() -> None:
    for task in (chain_sum(), gym("countdown")):
        for index in (-1, ITEMS):
            with pytest.raises(IndexError, match="outside"):
                task.item(index)


@pytest.mark.parametrize("name", ["chain_sum", "countdown"])
def test_a_missing_package_is_one_line_that_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=f"^task {name} needs the package reasoning-gym: pip install reasoning-gym$"):
        gym(name)
