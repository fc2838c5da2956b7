"""Tasks, sampler and trainer joined: draw items, sample, score, train, publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from vexact.loop.display import Display, summary
from vexact.loop.folder import RunFolder, free_path
from vexact.model.checkpoint import load_weights, save_folder
from vexact.model.config import DTYPES, ModelConfig
from vexact.model.rollout import Rollout
from vexact.model.tiny import named_config, tiny_weights
from vexact.model.tokenizer import Tokenizer, load_tokenizer, prompt_ids
from vexact.recipe import Recipe
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.tasks import Answer, Item, Scores, Scoring, Task, load_task
from vexact.training.advantage import Advantages, group_advantages
from vexact.training.trainer import Trainer, weights_of
from vexact_kernels import Kernels


@dataclass(frozen=True)
class RunResult:
    """folder: where the run lies. lines: what metrics.jsonl holds, one mapping a step."""

    folder: Path
    lines: list[dict[str, Any]]


def train(recipe: Recipe, *, kernels: Kernels, console: Console, task: Task | None = None) -> RunResult:
    """Run a recipe and leave a run folder. kernels: those of its device and profile.

    task: one of your own, in place of the one that the recipe names.

    Raises BadInput and leaves nothing behind. An interrupt is passed on after the summary; metrics.jsonl then holds the
    steps that were finished.
    """
    path = free_path(recipe.run, recipe.name)
    task = task or load_task(recipe.task, recipe.seed)
    loop = Loop(recipe, task, kernels, lambda line: console.print(line, soft_wrap=True, highlight=False))
    loop.check()
    folder = RunFolder(path, recipe)
    folder.write_environment(loop.trainer.policy, loop.trainer.fingerprint())
    lines: list[dict[str, Any]] = []
    try:
        with Display(console, recipe.steps, recipe.sampling.prompts * recipe.sampling.samples) as display:
            for step in range(recipe.steps):
                lines.append(loop.step(step, display))
                folder.append(lines[-1])
                display.stepped(lines[-1])
        if recipe.run.checkpoint:
            loop.save(folder.checkpoint)
    finally:
        console.print(summary(lines, folder.path))
    return RunResult(folder.path, lines)


class Loop:
    """What a run keeps from step to step. A step is a function of (recipe, step, weights)."""

    def __init__(self, recipe: Recipe, task: Task, kernels: Kernels, say: Callable[[str], None]) -> None:
        self.recipe, self.task = recipe, task
        self.scoring = Scoring(task, recipe.task, recipe.seed)
        self.trainer = load_trainer(recipe, kernels, say)
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.sampler = self.new_sampler()
        config = self.trainer.policy.config
        known = min(self.tokenizer.size, config.vocab_size)
        self.stop_ids = stop_ids(self.tokenizer, known, self.task.stop) | set(config.eos_token_ids)

    def new_sampler(self) -> Sampler:
        sampling = self.recipe.sampling
        return Sampler(
            self.trainer.policy,
            tokens_per_step=sampling.tokens_per_step,
            chunk=sampling.chunk,
            running=sampling.running,
        )

    def check(self) -> None:
        """Raise BadInput where a request of the first step can never be served: the model's positions, the pool."""
        unused = self.new_sampler()
        for request in self.requests(0, self.items(0)):
            unused.add(request)

    def step(self, step: int, display: Display) -> dict[str, Any]:
        """One round of the loop; what it measured, by name."""
        begin = perf_counter()
        display.sampling(step)
        items = self.items(step)
        requests = self.requests(step, items)
        asked = {request.id: item for request, item in zip(requests, items, strict=True)}
        rollouts = self.sampler.run(requests, display.sampled)
        sampled = perf_counter()
        display.training(step)
        scores = self.scores(step, asked, rollouts)
        advantages = self.advantages(rollouts, scores.rewards)
        metrics = self.trainer.step(rollouts, advantages.values)
        trained = perf_counter()
        self.sampler.adopt(self.trainer.policy)
        return {
            "step": step,
            **_reward_measures(scores.rewards, advantages),
            **scores.metrics(),
            **asdict(metrics),
            **_length_measures(rollouts),
            **_time_measures(rollouts, sampled - begin, trained - sampled),
            "fingerprint": self.trainer.fingerprint(),
        }

    def items(self, step: int) -> list[Item]:
        """The questions of a step: their positions follow from the step alone."""
        count = self.recipe.sampling.prompts
        return [self.task.item(step * count + i) for i in range(count)]

    def requests(self, step: int, items: Sequence[Item]) -> list[Request]:
        """One request an item. The id holds the step, so no two draws of a run share an address."""
        sampling = self.recipe.sampling
        return [
            Request(
                id=(step << 32) + i,
                prompt=prompt_ids(self.tokenizer, item.prompt, self.recipe.task.chat_template_kwargs),
                n=sampling.samples,
                temperature=sampling.temperature,
                seed=self.recipe.seed,
                max_tokens=sampling.max_tokens,
                stop_ids=self.stop_ids,
            )
            for i, item in enumerate(items)
        ]

    def scores(self, step: int, asked: Mapping[int, Item], rollouts: Sequence[Rollout]) -> Scores:
        """All rollouts of a step together: some reward functions want them so. asked: the item of each request."""
        answers = [
            Answer(asked[rollout.request], self.tokenizer.decode(rollout.completion), *rollout.id, rollout.completion)
            for rollout in rollouts
        ]
        return self.scoring.score(step, answers)

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> Advantages:
        groups = [rollout.request for rollout in rollouts]
        return group_advantages(rewards, groups, scale=self.recipe.loss.advantage == "group_std")

    def save(self, folder: Path) -> None:
        """The policy as a Hugging Face folder, in the dtype it computes in."""
        policy, model = self.trainer.policy, self.recipe.model.path
        save_folder(folder, policy.config, weights_of(policy), None if named_config(model) else model)


def load_trainer(recipe: Recipe, kernels: Kernels, say: Callable[[str], None]) -> Trainer:
    """The model of a recipe, ready to be trained. say: hears what was found in the checkpoint."""
    path, dtype = recipe.model.path, DTYPES.get(recipe.model.dtype)
    config = named_config(path)
    if config is not None:
        weights = tiny_weights(config)
    else:
        config = ModelConfig.from_folder(path)
        weights = load_weights(path, config, dtype, say)
    return Trainer.of(config, weights, kernels, dtype or config.dtype, recipe.loss, recipe.optimizer)


def stop_ids(tokenizer: Tokenizer, known: int, stop: str) -> frozenset[int]:
    """Ids below `known` whose text holds `stop`; none where it is empty."""
    return frozenset(token for token in range(known) if stop and stop in tokenizer.decode([token]))


def _reward_measures(rewards: Sequence[float], advantages: Advantages) -> dict[str, Any]:
    return {
        "reward_mean": math.fsum(rewards) / len(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "groups": advantages.groups,
        "zero_spread_groups": advantages.zero_spread,
    }


def _length_measures(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    lengths = [len(rollout.completion) for rollout in rollouts]
    return {
        "completion_length_mean": sum(lengths) / len(lengths),
        "completion_length_max": max(lengths),
        "stopped": sum(rollout.finish == "stop" for rollout in rollouts),
    }


def _time_measures(rollouts: Sequence[Rollout], sampling: float, training: float) -> dict[str, Any]:
    """Seconds; sampling counts completion tokens a second, training all tokens of the rollouts."""
    sampled = sum(len(rollout.completion) for rollout in rollouts)
    trained = sum(len(rollout.prompt) + len(rollout.completion) for rollout in rollouts)
    return {
        "sampling_seconds": sampling,
        "training_seconds": training,
        "seconds": sampling + training,
        "sampling_tokens_per_second": sampled / sampling,
        "training_tokens_per_second": trained / training,
    }
