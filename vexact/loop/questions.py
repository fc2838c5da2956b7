"""Between a task, which knows text only, and the sampler and trainer, which know tokens only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vexact.loop.folder import RunError
from vexact.model.config import ModelConfig
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tokenizer import Tokenizer, prompt_ids
from vexact.recipe import Recipe
from vexact.rollout.request import Request
from vexact.study import keys
from vexact.tasks import Answer, Item, Task
from vexact.tasks.task import ITEMS, SplitTask

EVALUATION = 1 << 63  # requests of evaluations are numbered from here: no step of training gets as far
FRESH = ITEMS - (ITEMS >> 2), 1 << 62  # first position and request of questions that only diagnoses ask
SOLUTIONS = ITEMS >> 1  # positions of items from which solutions are learned: no run gets as far by sampling


class Questions:
    """A run's items as requests, its rollouts as answers, its solutions as rollouts."""

    def __init__(self, recipe: Recipe, task: Task, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self.recipe, self.task, self.tokenizer = recipe, task, tokenizer
        known = min(tokenizer.size, config.vocab_size)
        self.end_ids = config.eos_token_ids
        self.stop_ids = stop_ids(tokenizer, known, task.stop) | set(self.end_ids)
        self._held_out: list[Item] | None = None

    def items(self, step: int, turn: int = 0, count: int | None = None) -> list[Item]:
        """The questions of a step's round of sampling: their positions follow from step and round alone.

        count: how many of them, by default as many as a step has prompts.
        """
        sampling = self.recipe.sampling
        first = (step * sampling.rounds + turn) * sampling.prompts
        return [self.task.item(first + i) for i in range(sampling.prompts if count is None else count)]

    def requests(self, step: int, items: Sequence[Item], turn: int = 0) -> list[Request]:
        """One request an item of a step. The id holds step and round, so no two draws of a run share an address."""
        sampling = self.recipe.sampling
        first = (step << 32) + turn * sampling.prompts
        return self._requests(items, first, sampling.samples, sampling.temperature, sampling.max_tokens, self.seed)

    @property
    def seed(self) -> int:
        """Of training's draws: the recipe's, or with a seed for sampling one of both."""
        own, other = self.recipe.seed, self.recipe.sampling.seed
        return int(keys.mixed(own, keys.named("sampling"), other)[0]) if other else own

    def fresh(self, step: int, count: int, skipped: int = 0) -> list[tuple[Item, Request]]:
        """Questions that no step asks, for a look at a step from outside. skipped: as many before them were asked."""
        sampling, (position, request) = self.recipe.sampling, FRESH
        items = [self.task.item(position + step * count + skipped + i) for i in range(count)]
        first = request + (step << 32) + skipped
        seed = self.recipe.seed
        asked = self._requests(items, first, sampling.samples, sampling.temperature, sampling.max_tokens, seed)
        return list(zip(items, asked, strict=True))

    def held_out(self) -> list[Item]:
        """The questions of an evaluation, the same each time. Raises RunError where the task has none."""
        if self._held_out is None:
            self._held_out = self._kept_back()
        return self._held_out

    def _kept_back(self) -> list[Item]:
        if not hasattr(self.task, "count"):
            raise RunError(f"eval.items: the task {type(self.task).__name__} has no questions for evaluation")
        task: SplitTask = self.task  # type: ignore[assignment]
        count, asked = task.count("held_out"), self.recipe.eval.items
        if count == 0:
            raise RunError("eval.items: no question belongs to the split held_out; see task.held_out")
        return [task.item(i, "held_out") for i in range(asked if count is None else min(asked, count))]

    def evaluation(self, items: Sequence[Item]) -> list[Request]:
        """One request a held-out item. The ids are those of every evaluation: equal policies give equal answers."""
        section = self.recipe.eval
        limit = section.max_tokens or self.recipe.sampling.max_tokens
        return self._requests(items, EVALUATION, section.n, section.temperature, limit, self.recipe.seed)

    def _requests(
        self, items: Sequence[Item], first: int, n: int, temperature: float, max_tokens: int, seed: int
    ) -> list[Request]:
        return [
            Request(
                id=first + i,
                prompt=self._prompt(item),
                n=n,
                temperature=temperature,
                seed=seed,
                max_tokens=max_tokens,
                stop_ids=self.stop_ids,
            )
            for i, item in enumerate(items)
        ]

    def answers(self, asked: Mapping[int, Item], rollouts: Sequence[Rollout]) -> list[Answer]:
        """asked: the item of each request."""
        return [
            Answer(asked[rollout.request], self.tokenizer.decode(rollout.completion), *rollout.id, rollout.completion)
            for rollout in rollouts
        ]

    def solutions(self, step: int, count: int, policy: Policy) -> list[Rollout]:
        """Whole right completions of that many items, as if the policy had sampled them. Nothing was recorded: their
        log-probabilities are 0.

        A solution ends with what the task stops at, or with the model's end. Raises RunError for an item without one.
        """
        items = [self.task.item(SOLUTIONS + step * count + i) for i in range(count)]
        return [self._solution((step << 32) + i, item, policy) for i, item in enumerate(items)]

    def _solution(self, request: int, item: Item, policy: Policy) -> Rollout:
        if not item.solution:
            raise RunError(f"{self._learner}: item {item.index} of task {self.recipe.task.name} has no solution")
        completion = self.tokenizer.continuation(item.solution)
        if not self.task.stop or self.task.stop not in item.solution:
            completion = [*completion, *self.end_ids[:1]]
        prompt, limit = self._prompt(item), policy.config.max_positions
        if len(prompt) + len(completion) > limit:
            raise RunError(
                f"{self._learner}: item {item.index} of task {self.recipe.task.name} has a prompt of {len(prompt)} "
                f"tokens and a solution of {len(completion)}, which exceed the model's {limit} positions"
            )
        return Rollout(
            request=request,
            sample=0,
            prompt=prompt,
            completion=completion,
            logprobs=torch.zeros(len(completion)),
            finish="stop",
            temperature=1.0,
            version=policy.version,
            digest=policy.digest,
        )

    @property
    def _learner(self) -> str:
        """The key that asks for solutions."""
        return "objective: sft" if self.recipe.objective == "sft" else "warm_start"

    def _prompt(self, item: Item) -> list[int]:
        return prompt_ids(self.tokenizer, item.prompt, self.recipe.task.chat_template_kwargs)


def stop_ids(tokenizer: Tokenizer, known: int, stop: str) -> frozenset[int]:
    """Ids below `known` whose text holds `stop`; none where it is empty."""
    return frozenset(token for token in range(known) if stop and stop in tokenizer.decode([token]))
