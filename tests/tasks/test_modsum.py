"""modsum: right by arithmetic of its own, endless, split by question, in signs that the tiny model reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vexact.model.checkpoint import save_folder
from vexact.model.config import ModelConfig
from vexact.model.tiny import named_config, tiny_weights
from vexact.model.tokenizer import NUMERALS, load_tokenizer
from vexact.recipe import TaskSection
from vexact.tasks import Item, TaskError, load_task
from vexact.tasks.task import ITEMS


def modsum(seed: int = 0, held_out: float = 0.0, **options: Any) -> Any:
    return load_task(TaskSection(name="modsum", options=options, held_out=held_out), seed)


def terms(item: Item) -> list[int]:
    assert isinstance(item.prompt, str)
    return [NUMERALS.index(sign) for sign in item.prompt.removesuffix("=").split("+")]


@pytest.mark.parametrize("modulus", [2, 7, 10, 24])
def test_the_solution_is_the_chain_of_sums_and_its_last_is_the_answer(modulus: int) -> None:
    task = modsum(modulus=modulus, min_terms=2, max_terms=6)
    for i in range(50):
        item = task.item(i)
        sums, running = [], 0
        for term in terms(item):
            assert 0 <= term < modulus
            running = (running + term) % modulus
            sums.append(NUMERALS[running])
        assert item.solution == ",".join(sums[1:]) + "\n"
        assert item.answer == sums[-1]
        assert task.reward(item, item.solution) == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("{}\n", 1.0),
        ("{}", 1.0),
        ("0,{}\nrest", 1.0),
        (",,{}", 1.0),
        ("{},", 0.0),
        ("{}0", 0.0),
        (" {}", 0.0),
        ("", 0.0),
    ],
)
def test_only_what_stands_behind_the_last_comma_counts(completion: str, reward: float) -> None:
    task = modsum()
    assert task.reward(task.item(0), completion.format(task.item(0).answer)) == reward


def test_an_item_is_a_function_of_seed_split_and_position() -> None:
    task, again = modsum(3, 0.2), modsum(3, 0.2)
    places = [(i, split) for split in ("train", "held_out") for i in (0, 7, ITEMS - 1)]
    assert [again.item(*place) for place in reversed(places)] == [task.item(*place) for place in places][::-1]
    for other in (modsum(4, 0.2), modsum(3 + 2**62, 0.2)):
        assert [other.item(i).prompt for i in range(20)] != [task.item(i).prompt for i in range(20)]
    assert [task.item(i).prompt for i in range(20)] != [task.item(i, "held_out").prompt for i in range(20)]


def test_no_question_is_in_both_splits_whatever_the_seed() -> None:
    """Two terms below ten: 100 questions, which 400 draws nearly all meet."""
    options = {"min_terms": 2, "max_terms": 2}
    trained = {modsum(seed, 0.2, **options).item(i).prompt for seed in (0, 1) for i in range(400)}
    held_out = {modsum(seed, 0.2, **options).item(i, "held_out").prompt for seed in (2, 3) for i in range(400)}
    assert trained & held_out == set()
    assert len(trained | held_out) == 100
    assert 8 <= len(held_out) <= 32  # 20 of them, four standard deviations of 3 either way


def test_lengths_and_numbers_are_evenly_drawn() -> None:
    items = [modsum(1, min_terms=2, max_terms=5).item(i) for i in range(4000)]
    lengths = Counter(len(terms(item)) for item in items)
    assert sorted(lengths) == [2, 3, 4, 5]
    assert all(abs(count - 1000) < 5 * 27.4 for count in lengths.values())  # five standard deviations
    for place in (0, 1):
        counts = Counter(terms(item)[place] for item in items)
        assert len(counts) == 10 and all(abs(count - 400) < 5 * 19 for count in counts.values())
    pairs = Counter((terms(item)[0], terms(item)[1]) for item in items)
    assert len(pairs) == 100 and max(pairs.values()) < 40 + 5 * 6.3


def test_the_smallest_splits_are_had_or_refused() -> None:
    task = modsum(0, 0.5, modulus=2, min_terms=2, max_terms=2)  # four questions
    assert {task.item(i).prompt for i in range(50)} | {task.item(i, "held_out").prompt for i in range(50)} == {
        "0+0=", "0+1=", "1+0=", "1+1="
    }  # fmt: skip
    with pytest.raises(TaskError, match="4096 questions were drawn, none for the split held_out"):
        modsum(0, 1e-6, modulus=2, min_terms=2, max_terms=2).item(0, "held_out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modulus": 25}, "task.options.modulus = 25 is outside 2 … 24"),
        ({"modulus": 1}, "task.options.modulus = 1 is outside 2 … 24"),
        ({"min_terms": 1}, "task.options.min_terms = 1 is outside 2 … 16"),
        ({"max_terms": 3}, "task.options.max_terms = 3 is outside 4 … 16"),
        ({"moduls": 3}, "task.options: unknown option moduls; did you mean modulus?"),
        ({"modulus": 9.5}, "task.options.modulus = 9.5 is not an integer"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        modsum(**options)
    assert str(caught.value) == message


def test_the_tiny_model_of_modsum_reads_every_sign_and_nothing_else() -> None:
    config, tokenizer = named_config("tiny-modsum"), load_tokenizer("tiny-modsum")
    assert config is not None
    assert (config.vocab_size, tokenizer.size, config.num_layers, config.hidden_size) == (32, 31, 2, 64)
    item = modsum(modulus=24, min_terms=6, max_terms=6).item(3)
    ids = tokenizer.encode(item.prompt + item.solution)
    assert ids[0] == config.raw["bos_token_id"] and len(ids) == 1 + 12 + 10
    assert (
        max(ids) < tokenizer.size and tokenizer.decode([*ids, *config.eos_token_ids, 31]) == item.prompt + item.solution
    )
    with pytest.raises(ValueError, match=r"and no 'A'"):
        tokenizer.encode("A")
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "1"}], {})


def test_a_model_saved_from_it_reads_the_same_signs(tmp_path: Path) -> None:
    config = named_config("tiny-modsum")
    assert config is not None
    save_folder(tmp_path / "saved", config, tiny_weights(config))
    assert load_tokenizer(tmp_path / "saved").encode("1+n=") == load_tokenizer("tiny-modsum").encode("1+n=")
    assert ModelConfig.from_folder(tmp_path / "saved").vocab_size == 32
    assert named_config(tmp_path / "saved") is None
