"""From completions to the rewards that train and the success that is measured.

One rule for a reward that fails, whoever computes it: a call that raises or takes longer than `seconds`, and a value
that is no finite number, give `on_error` to the completions concerned, no success, and are counted; with `fatal` they
end the run. A call scores one completion, or all of a step in TRL's form. Running out of time is the one thing in which
a run depends on the machine: the counts say whether it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vexact.errors import BadInput
from vexact.recipe import TaskSection
from vexact.tasks.flip import flipped
from vexact.tasks.limit import TimeUp, limited
from vexact.tasks.reward import Reward, load_reward
from vexact.tasks.task import Answer, Task, TaskError


class RewardError(BadInput):
    """A reward that failed where that is fatal. One line: the function and what happened."""


@dataclass(frozen=True)
class Scores:
    """Of a list of completions, in its order.

    rewards: what training gets, flips included. unflipped: before flips. successes: whether the unflipped reward is at
    least `success_at`. The counts are of completions. first_failure: what happened to the first that failed, or "".
    """

    rewards: list[float]
    unflipped: list[float]
    successes: list[bool]
    flipped: int
    raised: int
    not_finite: int
    timed_out: int
    first_failure: str

    def metrics(self) -> dict[str, Any]:
        """By the names of metrics.jsonl."""
        return {
            "success_mean": math.fsum(self.successes) / max(1, len(self.successes)),
            "rewards_flipped": self.flipped,
            "rewards_raised": self.raised,
            "rewards_not_finite": self.not_finite,
            "rewards_timed_out": self.timed_out,
            "reward_failure": self.first_failure,
        }


class Scoring:
    """The scorer of a run. task: the recipe's, or one of the caller's own. Raises TaskError."""

    def __init__(self, task: Task, section: TaskSection, seed: int) -> None:
        self._section, self._seed = section.reward, seed
        self._reward: Reward = load_reward(section.reward, task, section.name)
        if self._section.flip and (self._section.function or not getattr(task, "binary", False)):
            raise TaskError(f"task.reward.flip needs rewards of 0 and 1: {self._reward.name} may give others")

    def score(self, step: int, answers: Sequence[Answer]) -> Scores:
        """step: addresses the flips, with the seed and each answer's request and sample. Raises RewardError."""
        failures = _Failures(self._reward.name, self._section.fatal)
        found: dict[int, float] = {}
        for positions, call in self._reward.calls(answers):
            values = self._called(call, positions, failures)
            found.update({at: failures.checked(value, at) for at, value in zip(positions, values, strict=True)})
        unflipped = [self._section.on_error if math.isnan(found[i]) else found[i] for i in range(len(answers))]
        flips = [self._is_flipped(step, answer) for answer in answers]
        return Scores(
            rewards=[1.0 - reward if flip else reward for reward, flip in zip(unflipped, flips, strict=True)],
            unflipped=unflipped,
            successes=[not math.isnan(found[i]) and found[i] >= self._section.success_at for i in range(len(answers))],
            flipped=sum(flips),
            raised=failures.raised,
            not_finite=failures.not_finite,
            timed_out=failures.timed_out,
            first_failure=failures.first,
        )

    def _called(
        self, call: Callable[[], Sequence[Any]], positions: Sequence[int], failures: _Failures
    ) -> Sequence[Any]:
        """One value an answer, _FAILED where the call was."""
        try:
            return limited(self._section.seconds, partial(_whole, call, len(positions)))
        except TimeUp as error:
            failures.timed_out += len(positions)
            failures.note(positions[0], str(error), error)
        except Exception as error:  # the project did not write what is called here
            failures.raised += len(positions)
            failures.note(positions[0], f"{type(error).__name__}: {error}", error)
        return [_FAILED] * len(positions)

    def _is_flipped(self, step: int, answer: Answer) -> bool:
        p = self._section.flip
        return p > 0.0 and flipped(self._seed, step, answer.request, answer.sample, p)


_FAILED = object()  # the value of a call that failed and is counted


@dataclass
class _Failures:
    """What went wrong so far."""

    name: str
    fatal: bool
    raised: int = 0
    not_finite: int = 0
    timed_out: int = 0
    first: str = ""

    def checked(self, value: Any, at: int) -> float:
        """A finite reward, or NaN."""
        if value is _FAILED:
            return math.nan
        number = _number(value)
        if not math.isfinite(number):
            self.not_finite += 1
            self.note(at, f"gave {value!r}, which is no finite number", None)
            return math.nan
        return number

    def note(self, at: int, what: str, cause: BaseException | None) -> None:
        line = f"{self.name}: completion {at}: {' '.join(what.split())}"
        self.first = self.first or line
        if self.fatal:
            raise RewardError(line) from cause


def _whole(call: Callable[[], Sequence[Any]], count: int) -> list[Any]:
    values = list(call())
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for {count} completions")
    return values


def _number(value: Any) -> float:
    """NaN for what is no number: text, and None, which is TRL's way to say nothing."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except Exception:  # an array of two values, or whatever a function may give
        return math.nan
