"""Questions from real files, in TRL's form and in verl's; what a file holds wrong is named by its row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from vexact.recipe import RewardSection, TaskSection
from vexact.tasks import Item, TaskError, load_task

Write = Callable[[Path, Sequence[Any]], Path]


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return path


def parquet(path: Path, rows: Sequence[Any]) -> Path:
    path = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def trl(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {i} + 1?", "solution": f"{i + 1}", "level": i} for i in range(count)]


def verl(count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + 1 – naïve?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": f"{i + 1}"},
            "extra_info": {"split": "train", "index": i, "answer": f"{i} and 1 make\n#### {i + 1}"},
        }
        for i in range(count)
    ]


def load(path: Path, seed: int = 0, held_out: float = 0.0, section: TaskSection | None = None, **options: Any) -> Any:
    section = section or TaskSection()
    values = {"name": "file", "options": {"path": str(path), **options}, "held_out": held_out}
    return load_task(TaskSection(**{**vars(section), **values}), seed)


@pytest.fixture(params=[jsonl, parquet])
def write(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_row_in_trls_form_is_an_item(write: Write, tmp_path: Path) -> None:
    task = load(write(tmp_path / "a", trl(3)), shuffle=False)
    assert task.item(1) == Item(1, "What is 1 + 1?", "2", "2", {"solution": "2", "level": 1})
    assert task.reward(task.item(1), " 2\n") == 1.0 and task.reward(task.item(1), "22") == 0.0


def test_a_row_in_verls_form_is_an_item(write: Write, tmp_path: Path) -> None:
    rows = verl(3)
    item = load(write(tmp_path / "a", rows), shuffle=False).item(2)
    assert item.prompt == ({"role": "user", "content": "What is 2 + 1 – naïve?"},)
    assert (item.answer, item.solution) == ("3", "2 and 1 make\n#### 3")
    assert item.columns == {name: value for name, value in rows[2].items() if name != "prompt"}


def test_a_whole_completion_is_the_solution_to_learn_from(write: Write, tmp_path: Path) -> None:
    text = [{"prompt": "a", "completion": " b", "solution": "c"}]
    chat = [{"prompt": "a", "completion": [{"role": "assistant", "content": " b"}], "answer": "c"}]
    for name, rows in (("text", text), ("chat", chat)):
        item = load(write(tmp_path / name, rows)).item(0)
        assert (item.solution, item.answer) == (" b", "c")


def test_the_columns_can_be_named(write: Write, tmp_path: Path) -> None:
    item = load(
        write(tmp_path / "a", [{"question": "a", "prompt": "b", "key": 7}]), prompt="question", answer="key"
    ).item(0)
    assert (item.prompt, item.answer, item.columns) == ("a", "7", {"prompt": "b", "key": 7})


def test_each_pass_has_every_row_once_in_an_order_of_its_own(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path / "a", trl(40))
    task = load(path)
    passes = [[task.item(40 * p + i).columns["level"] for i in range(40)] for p in range(3)]
    assert all(sorted(rows) == list(range(40)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 3
    assert [load(path).item(40 + i).columns["level"] for i in (3, 1)] == [passes[1][3], passes[1][1]]
    assert [load(path, seed=1).item(i).columns["level"] for i in range(40)] != passes[0]
    plain = load(path, shuffle=False)
    assert [plain.item(i).columns["level"] for i in range(80)] == [*range(40), *range(40)]


def test_held_out_rows_are_never_trained_on_even_where_a_file_repeats_them(write: Write, tmp_path: Path) -> None:
    rows = [*trl(60), *trl(60)]
    task = load(write(tmp_path / "a", rows), held_out=0.25)
    train, held_out = ([task.item(i, s).prompt for i in range(task.count(s))] for s in ("train", "held_out"))
    assert len(train) + len(held_out) == 120
    assert 4 <= len(set(held_out)) <= 28  # 15 of 60, about four standard deviations of 3.4 either way
    assert set(train) & set(held_out) == set()
    assert load(tmp_path / f"a{'.jsonl' if write is jsonl else '.parquet'}", 9, 0.25).item(3, "held_out") == task.item(
        3, "held_out"
    )


def test_a_file_for_evaluation_takes_its_questions_out_of_training(write: Write, tmp_path: Path) -> None:
    train, test = write(tmp_path / "train", verl(20)), write(tmp_path / "test", verl(23)[15:])
    task = load(train, held_out_path=str(test))
    assert (task.count("train"), task.count("held_out")) == (15, 8)
    assert {task.item(i).columns["extra_info"]["index"] for i in range(15)} == set(range(15))
    assert [task.item(i, "held_out").columns["extra_info"]["index"] for i in range(9)] == [*range(15, 23), 15]
    with pytest.raises(TaskError, match="held_out_path both name questions"):
        load(train, held_out=0.1, held_out_path=str(test))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": 1', "a.jsonl: line 2 is not JSON"),
        ('["prompt"]', "a.jsonl: line 1 holds list, not keys and values"),
        ("\n", "a.jsonl: has no rows"),
        ('{"promt": "a"}', "a.jsonl: unknown column prompt; did you mean promt?"),
        ('{"prompt": "a"}\n{"answer": "b"}', "a.jsonl: row 2: the prompt is NoneType, must be text or a list"),
        ('{"prompt": []}', "a.jsonl: row 1: the prompt is list, must be text"),
        ('{"prompt": [{"role": "user"}]}', "a.jsonl: row 1: a message of the prompt has no role and content of text"),
        ('{"prompt": "a"}', "a.jsonl: has no column solution or answer; name task.reward.function or task.opt"),
    ],
)  # fmt: skip
def test_what_a_file_holds_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(TaskError) as caught:
        load(tmp_path / "a.jsonl")
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "a.csv").write_text("no")
    for name, message in (
        ("b.jsonl", "no such file"),
        ("b.parquet", "no such file"),
        ("a.parquet", "is not parquet"),
        ("a.csv", "must be a .jsonl or .parquet file"),
    ):
        with pytest.raises(TaskError, match=f"{name}: {message}"):
            load(tmp_path / name)
    with pytest.raises(TaskError, match=r"^task file needs task\.options\.path$"):
        load_task(TaskSection(name="file"), 0)


def test_a_reward_function_does_without_an_answer(tmp_path: Path) -> None:
    section = TaskSection(reward=RewardSection(function="some:function"))
    assert load(jsonl(tmp_path / "a", [{"prompt": "a"}]), section=section).item(0).answer == ""


def test_a_row_without_an_answer_does_not_reward_silence(tmp_path: Path) -> None:
    task = load(jsonl(tmp_path / "a", [{"prompt": "a", "answer": "b"}, {"prompt": "c"}]), shuffle=False)
    with pytest.raises(ValueError, match="item 1 has no answer"):
        task.reward(task.item(1), "")


def test_an_empty_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"a\.jsonl: no row belongs to the split held_out; see task\.held_out"):
        load(jsonl(tmp_path / "a", trl(1))).item(0, "held_out")
