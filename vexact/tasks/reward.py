"""Reward functions of one's own: `module:function` or `file.py:function`, called as TRL or as verl calls them.

All arguments are given by name. A function without **kwargs gets those that it names.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from vexact.recipe import RewardSection
from vexact.tasks.options import check_names
from vexact.tasks.task import Answer, Task, TaskError

MATH = "math_verify"  # short for the function of vexact.tasks.mathematics
NOT_COLUMNS = ("prompt", "completion", "completion_ids", "prompts", "completions")


class Reward(Protocol):
    """Something that scores completions in calls; a call fails or succeeds as a whole."""

    name: str

    def calls(self, answers: Sequence[Answer]) -> list[tuple[list[int], Callable[[], Sequence[Any]]]]:
        """For each call the positions of its answers, and the call itself: it gives one value for each of them."""
        ...


class Own:
    """The scorer of the task itself: a call for each completion."""

    def __init__(self, task: Task) -> None:
        self.name, self._task = f"{type(task).__name__}.reward", task

    def calls(self, answers: Sequence[Answer]) -> list[tuple[list[int], Callable[[], Sequence[Any]]]]:
        return [([i], partial(self._one, answer)) for i, answer in enumerate(answers)]

    def _one(self, answer: Answer) -> list[Any]:
        return [self._task.reward(answer.item, answer.completion)]


class TRL:
    """`function(prompts, completions, **columns)`: lists in, a list of rewards out; one call for all completions.

    Every column of the items is a list, with None where an item has none; so are `prompts`, `completions` and
    `completion_ids`. Completions of a chat are lists of one message of the assistant.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name, self._function = name, function
        self._takes = _Takes.of(function)

    def calls(self, answers: Sequence[Answer]) -> list[tuple[list[int], Callable[[], Sequence[Any]]]]:
        return [(list(range(len(answers))), partial(self._all, answers))] if answers else []

    def _all(self, answers: Sequence[Answer]) -> list[Any]:
        given: dict[str, list[Any]] = {
            name: [answer.item.columns.get(name) for answer in answers]
            for name in dict.fromkeys(name for answer in answers for name in answer.item.columns)
            if name not in NOT_COLUMNS
        }
        given.setdefault("answer", [answer.item.answer for answer in answers])
        given["prompts"] = [_trl_prompt(answer) for answer in answers]
        given["completions"] = [_trl_completion(answer) for answer in answers]
        given["completion_ids"] = [list(answer.ids) for answer in answers]
        return list(self._function(**self._takes.of_those(given)))


class Verl:
    """`function(data_source, solution_str, ground_truth, extra_info)`: one completion in, its score out; a call each.

    A mapping that comes back holds the score under `score`. Items that are not in verl's form have the task's name as
    data_source, their answer as ground_truth and their columns as extra_info.
    """

    def __init__(self, function: Callable[..., Any], name: str, task: str) -> None:
        self.name, self._function, self._task = name, function, task
        self._takes = _Takes.of(function)

    def calls(self, answers: Sequence[Answer]) -> list[tuple[list[int], Callable[[], Sequence[Any]]]]:
        return [([i], partial(self._one, answer)) for i, answer in enumerate(answers)]

    def _one(self, answer: Answer) -> list[Any]:
        columns = answer.item.columns
        judged = columns.get("reward_model")
        given = {
            "data_source": columns.get("data_source", self._task),
            "solution_str": answer.completion,
            "ground_truth": judged.get("ground_truth") if isinstance(judged, Mapping) else answer.item.answer,
            "extra_info": columns.get("extra_info") if judged is not None else {**columns, "index": answer.item.index},
        }
        score = self._function(**self._takes.of_those(given))
        return [score["score"] if isinstance(score, Mapping) else score]


def load_reward(section: RewardSection, task: Task, task_name: str) -> Reward:
    """The function that a recipe names, or the task's own scorer. Raises TaskError naming the key, file or function."""
    if not section.function:
        for key in ("signature", "options"):
            if getattr(section, key) != getattr(RewardSection(), key):
                raise TaskError(f"task.reward.{key} is of a function: task.reward.function is empty")
        return Own(task)
    name = "vexact.tasks.mathematics:math_reward" if section.function == MATH else section.function
    function = _found(name)
    where = f"task.reward.function {section.function}"
    if inspect.iscoroutinefunction(function):
        raise TaskError(f"{where}: is asynchronous, must be an ordinary function")
    takes = _Takes.of(function)
    if section.options:
        if not takes.others:
            check_names(section.options, sorted(takes.names), f"task.reward.options of {section.function}")
        function = partial(function, **section.options)
    signature = section.signature if section.signature != "auto" else _signature(takes.names, where)
    return TRL(function, section.function) if signature == "trl" else Verl(function, section.function, task_name)


def _signature(names: frozenset[str], where: str) -> str:
    if "completions" in names:
        return "trl"
    if names & {"solution_str", "ground_truth"}:
        return "verl"
    raise TaskError(f"{where}: names neither completions nor solution_str; say task.reward.signature: trl or verl")


@dataclass(frozen=True)
class _Takes:
    """Keyword arguments of a function: their names, and whether it takes any others."""

    names: frozenset[str]
    others: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> _Takes:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some functions written in C do not say
            return _Takes(frozenset(), True)
        others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return _Takes(frozenset(parameter.name for parameter in parameters), others)

    def of_those(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What can be given to it."""
        return {name: value for name, value in given.items() if self.others or name in self.names}


def _found(name: str) -> Callable[..., Any]:
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise TaskError(f"task.reward.function = {name!r}: must be module:function or file.py:function")
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except TaskError:
        raise
    except Exception as error:  # whatever the code does when it is imported
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise TaskError(f"task.reward.function {name}: {source} cannot be imported ({said})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise TaskError(f"task.reward.function {name}: {source} has no function {attribute}")
    return function


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise TaskError(f"task.reward.function: {path}: no such file")
    # A name of its own for each file: two of the same stem must not be one module.
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task.reward.function: {path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


def _trl_prompt(answer: Answer) -> Any:
    prompt = answer.item.prompt
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _trl_completion(answer: Answer) -> Any:
    text = answer.completion
    return text if isinstance(answer.item.prompt, str) else [{"role": "assistant", "content": text}]
