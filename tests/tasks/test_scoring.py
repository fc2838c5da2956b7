"""One rule for rewards that fail, a limit of time that holds, and success that no flip touches."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vexact.recipe import RewardSection, TaskSection
from vexact.tasks import Answer, Item, RewardError, Scores, Scoring, TaskError, load_task
from vexact.tasks.flip import flipped
from vexact.tasks.limit import TimeUp, limited

SLOW = 0.3  # seconds that a call may take here
ODD: dict[str, object] = {"none": None, "text": "1", "pair": [1.0, 2.0], "int": 1}  # what rewards give


class Acting:
    """A task whose reward does what the completion says."""

    stop = "\n"
    binary = True

    def item(self, index: int) -> Item:
        return Item(index, "", "")

    def reward(self, item: Item, completion: str) -> float:
        if completion == "raise":
            raise ArithmeticError("no\nnumber")
        if completion == "exit":
            raise SystemExit(3)
        if completion == "sleep":
            time.sleep(30)
        while completion == "spin":
            pass
        while completion == "stubborn":
            try:
                time.sleep(30)
            except Exception:
                continue
        return ODD[completion] if completion in ODD else float(completion)  # type: ignore[return-value]


def score(*completions: str, step: int = 0, seed: int = 0, task: Any = None, **keys: Any) -> Scores:
    scoring = Scoring(task or Acting(), TaskSection(reward=RewardSection(**{"seconds": SLOW, **keys})), seed)
    return scoring.score(step, [Answer(Item(i, "", ""), text, i, 0) for i, text in enumerate(completions)])


def test_scores_keep_the_order_of_the_completions() -> None:
    scores = score("0.5", "1", "int", "-2")
    assert scores.rewards == scores.unflipped == [0.5, 1.0, 1.0, -2.0]
    assert scores.successes == [False, True, True, False]
    assert (scores.raised, scores.not_finite, scores.timed_out, scores.first_failure) == (0, 0, 0, "")
    assert scores.metrics()["success_mean"] == 0.5


@pytest.mark.parametrize(
    ("completion", "counts", "said"),
    [
        ("raise", (1, 0, 0), "completion 1: ArithmeticError: no number"),
        ("spin", (0, 0, 1), "completion 1: took longer than 0.3 s"),
        ("sleep", (0, 0, 1), "completion 1: took longer than 0.3 s"),
        ("stubborn", (0, 0, 1), "completion 1: took longer than 0.3 s"),
        ("nan", (0, 1, 0), "completion 1: gave nan, which is no finite number"),
        ("inf", (0, 1, 0), "completion 1: gave inf, which is no finite number"),
        ("none", (0, 1, 0), "completion 1: gave None, which is no finite number"),
        ("text", (0, 1, 0), "completion 1: gave '1', which is no finite number"),
        ("pair", (0, 1, 0), "completion 1: gave [1.0, 2.0], which is no finite number"),
    ],
)
def test_a_reward_that_fails_is_replaced_and_counted_and_ends_the_run_only_where_asked(
    completion: str, counts: tuple[int, int, int], said: str
) -> None:
    begin = time.monotonic()
    scores = score("1", completion, "0.25", on_error=2.0)
    assert time.monotonic() - begin < 5
    assert scores.rewards == [1.0, 2.0, 0.25]
    assert scores.successes == [True, False, False]  # 2.0 would be one
    assert (scores.raised, scores.not_finite, scores.timed_out) == counts
    assert scores.first_failure == f"Acting.reward: {said}"
    metrics = scores.metrics()
    assert (metrics["rewards_raised"], metrics["rewards_not_finite"], metrics["rewards_timed_out"]) == counts
    with pytest.raises(RewardError, match=said.replace("[", r"\[")):
        score("1", completion, fatal=True)


def test_the_program_can_still_be_ended() -> None:
    """What is no Exception is no failed reward."""
    with pytest.raises(SystemExit):
        score("exit")


def test_a_function_for_all_completions_fails_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import time\n"
        "def short(completions): return [1.0]\n"
        "def slow(completions): time.sleep(30)\n"
        "def some(completions): return [1.0, None, float('nan')]\n"
    )
    for name, counts, rewards, said in (
        ("short", (3, 0, 0), [-1.0, -1.0, -1.0], "ValueError: 1 rewards for 3 completions"),
        ("slow", (0, 0, 3), [-1.0, -1.0, -1.0], "took longer"),
        ("some", (0, 2, 0), [1.0, -1.0, -1.0], "completion 1: gave None"),
    ):
        scores = score("a", "b", "c", function=f"{path}:{name}", on_error=-1.0)
        assert scores.rewards == rewards
        assert (scores.raised, scores.not_finite, scores.timed_out) == counts
        assert said in scores.first_failure


def test_flips_change_what_trains_and_never_what_is_measured() -> None:
    completions = ["1", "0"] * 100
    scores = score(*completions, step=4, seed=9, flip=0.3)
    expected = [flipped(9, 4, i, 0, 0.3) for i in range(200)]
    assert scores.flipped == sum(expected) == scores.metrics()["rewards_flipped"]
    assert 30 < scores.flipped < 90
    assert scores.unflipped == [1.0, 0.0] * 100
    assert scores.rewards == [1.0 - r if flip else r for r, flip in zip(scores.unflipped, expected, strict=True)]
    assert scores.successes == [True, False] * 100
    for address in ({"step": 5, "seed": 9}, {"step": 4, "seed": 8}):
        assert score(*completions, flip=0.3, **address).rewards != scores.rewards
    reverse = Scoring(Acting(), TaskSection(reward=RewardSection(flip=0.3)), 9).score(
        4, [Answer(Item(i, "", ""), completions[i], i, 0) for i in reversed(range(200))]
    )
    assert reverse.rewards == scores.rewards[::-1]


def test_only_rewards_of_0_and_1_are_flipped(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(completions): return [2.0 for c in completions]\n")
    for section in (
        TaskSection(name="countdown", reward=RewardSection(flip=0.1)),
        TaskSection(name="modsum", reward=RewardSection(flip=0.1, function=f"{tmp_path}/own.py:f")),
    ):
        with pytest.raises(TaskError, match=r"^task\.reward\.flip needs rewards of 0 and 1: .* may give others$"):
            Scoring(load_task(section, 0), section, 0)
    section = TaskSection(name="modsum", reward=RewardSection(flip=0.1))
    task = load_task(section, 0)
    answers = [Answer(task.item(i), task.item(i).solution, i, 0) for i in range(100)]
    scores = Scoring(task, section, 0).score(0, answers)
    assert all(scores.successes) and 0.0 in scores.rewards and scores.rewards.count(0.0) == scores.flipped


def test_how_good_a_success_is_can_be_said() -> None:
    assert score("0.5", "0.4", success_at=0.5).successes == [True, False]


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(10)
    return found[0]


def test_in_another_thread_the_limit_holds_too() -> None:
    scores = in_a_thread(lambda: score("1", "stubborn", "raise", "0.5"))
    assert scores.rewards == [1.0, 0.0, 0.0, 0.5]
    assert (scores.raised, scores.timed_out) == (1, 1)


def test_the_limit_leaves_timer_and_handler_as_they_were() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        handler = signal.getsignal(signal.SIGALRM)
        with pytest.raises(TimeUp):
            limited(SLOW, lambda: time.sleep(30))
        assert limited(SLOW, lambda: 3) == 3
        with pytest.raises(KeyError):
            limited(SLOW, lambda: {"a": 1}["b"])
        assert signal.getsignal(signal.SIGALRM) is handler
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert 0.0 < left < 1.0 - SLOW / 2
        time.sleep(1.1)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_after_a_limited_call_nothing_rings() -> None:
    for call in (lambda: 1, lambda: math.sqrt(4)):
        limited(SLOW, call)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    time.sleep(2 * SLOW)


def test_a_limit_costs_little() -> None:
    """64 completions a step of 50 ms: 100 µs each would be an eighth of it."""
    begin = time.process_time()
    for _ in range(1000):
        limited(1.0, lambda: 0)
    assert time.process_time() - begin < 0.1  # 5 µs each where nothing else runs
