"""Tasks, sampler and trainer joined: draw items, sample, score, train, publish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from vexact.loop.diagnosis import Diagnosis
from vexact.loop.display import Display, summary
from vexact.loop.dosing import dose_line, find_dose
from vexact.loop.evaluation import evaluate
from vexact.loop.folder import METRICS, RunError, read_lines, remove_folder, run_path
from vexact.loop.gathered import Gathered, gather, joined
from vexact.loop.measures import lag_measures, length_measures, time_measures
from vexact.loop.names import TIM
from vexact.loop.questions import Questions
from vexact.loop.resume import check_same, is_done
from vexact.loop.rollouts import Sampled
from vexact.loop.run import Run, check_extras
from vexact.loop.samplers import Samplers, new_sampler
from vexact.loop.sharing import SharedScoring, sample_shared
from vexact.loop.supervised import CROSS_ENTROPY, learn, supervised_line
from vexact.loop.versions import Versions, check_accept, check_memory, largest_lag, memory_of, spare_of
from vexact.loop.warm_start import WarmStart, supervised_optimizer
from vexact.model.checkpoint import load_weights, save_folder
from vexact.model.config import DTYPES, ModelConfig
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tiny import named_config, tiny_weights
from vexact.model.tokenizer import load_tokenizer
from vexact.ranks import Ranks
from vexact.recipe import LossSection, OptimizerSection, Recipe
from vexact.rollout.request import Request
from vexact.study.mismatch import Mismatch, check_mismatch
from vexact.study.remedies import remedy_of
from vexact.tasks import Scores, Task, load_task
from vexact.training.admission import Source
from vexact.training.schedule import learning_rate
from vexact.training.trainer import Trainer, weights_of
from vexact_kernels import Kernels

BEGINNING = -1  # the step of the line that says what was before the first one


@dataclass(frozen=True)
class RunResult:
    """folder: where the run lies. lines: what metrics.jsonl holds: one mapping a step, and before them one of step −1
    where a warm start or an evaluation came before the first step."""

    folder: Path
    lines: list[dict[str, Any]]


def train(
    recipe: Recipe, *, kernels: Kernels, console: Console, task: Task | None = None, ranks: Ranks | None = None
) -> RunResult:
    """Run a recipe and leave a run folder. kernels: those of its device and profile.

    task: one of your own, in place of the one that the recipe names. ranks: the processes that share the run, each of
    which calls this; the first alone writes.

    Raises BadInput and leaves nothing behind. An interrupt is passed on after the summary; metrics.jsonl then holds the
    steps that were finished.
    """
    ranks = ranks or Ranks()
    console = console if ranks.first else Console(quiet=True)
    path = ranks.from_first(lambda: run_path(recipe))
    check_extras(recipe)
    if ranks.from_first(lambda: check_same(recipe, path) and is_done(recipe, path)):
        lines = read_lines(path / METRICS)
        console.print(summary(lines, path))
        return RunResult(path, lines)
    task = task or load_task(recipe.task, recipe.seed)
    say = lambda line: console.print(line, soft_wrap=True, highlight=False)  # noqa: E731
    loop = Loop(recipe, task, kernels, say, ranks)
    loop.check()
    with Run(path, recipe, ranks, say) as run:
        first = loop.take_up(run)
        lines = run.lines()
        try:
            with Display(console, recipe.steps, recipe.sampling.prompts * recipe.sampling.samples) as display:
                for step in range(first, recipe.steps):
                    line = loop.step(step, display) if step >= 0 else loop.begin(say)
                    line = {**line, **loop.evaluate(step)}
                    ranks.agree("weights fingerprint", line.get("fingerprint"))
                    if line:
                        lines.append(run.stepped({"step": step, **line}, loop.sampled))
                        display.stepped(lines[-1])
                    if loop.improved and ranks.first:
                        save_best(loop, step + 1, path)
                    run.keep(loop.trainer, step + 1, loop.values(), loop.versions.policies())
            run.finish(loop.trainer, loop.save)
        finally:
            console.print(summary(lines, path))
    return RunResult(path, lines)


class Loop:
    """What a run keeps from step to step. A step is a function of (recipe, step, weights).

    State beside the trainer: `versions` (its held policies and its origin) and `best`, the greatest success of the
    trainer's policy so far. improved: whether the last evaluation was that one. sampled: of the last step.
    """

    def __init__(
        self, recipe: Recipe, task: Task, kernels: Kernels, say: Callable[[str], None], ranks: Ranks | None = None
    ) -> None:
        self.recipe, self.task, self.ranks = recipe, task, ranks or Ranks()
        self.scoring = SharedScoring(task, recipe.task, recipe.seed, self.ranks)
        if recipe.warm_start.steps:
            optimizer = supervised_optimizer(recipe)
            self.trainer = load_trainer(recipe, kernels, say, CROSS_ENTROPY, optimizer, ranks=self.ranks)
        elif self.supervised:
            self.trainer = load_trainer(recipe, kernels, say, CROSS_ENTROPY, ranks=self.ranks)
        else:
            self.trainer = load_trainer(recipe, kernels, say, max_lag=largest_lag(recipe), ranks=self.ranks)
        self.questions = Questions(recipe, task, load_tokenizer(recipe.model.path), self.trainer.policy.config)
        self.samplers = Samplers(recipe.sampling)
        self.versions = Versions(recipe.sync.every, recipe.delay, spare_of(recipe))
        self.versions.publish(0, self.trainer.policy)
        self.mismatch = Mismatch(recipe.mismatch, recipe.seed)
        self.best, self.improved = -1.0, False
        self.sampled: Sampled | None = None

    @property
    def supervised(self) -> bool:
        """Whether the steps themselves learn from solutions."""
        return self.recipe.objective == "sft"

    def values(self) -> dict[str, Any]:
        """What of the state beside the trainer is not a policy, as JSON."""
        return {
            "origin": self.versions.origin,
            "best": self.best,
            "mismatch": self.mismatch.values(),
            "remedy": {} if self.trainer.remedy is None else self.trainer.remedy.state(),
        }

    def take_up(self, run: Run) -> int:
        """Go on where the run's folder ends. The step to begin with."""
        if run.state is not None and self.recipe.warm_start.steps:
            self.reinforce()
        restored = run.take_up(self.trainer)
        if restored is None:
            return BEGINNING
        step, values = restored.progress.step, restored.progress.loop
        self.best = values["best"]
        self.mismatch.restore(values["mismatch"])
        if self.trainer.remedy is not None:
            self.trainer.remedy.take_up(values.get("remedy", {}))
        self.versions.restore(values["origin"], restored.policies)
        self.samplers.adopt(self.versions.policy(step))
        return step

    def check(self) -> None:
        """Raise BadInput for what would fail later: requests that can never be served, by the model's positions or the
        pool; versions that do not fit into memory; questions for evaluation, or solutions, that are not there."""
        recipe, policy = self.recipe, self.trainer.policy
        check_mismatch(recipe)
        remedy = remedy_of(recipe.loss.remedy)
        if recipe.run.diagnose and not self.trainer.shards.alone:
            raise RunError("run.diagnose: gradients are compared in one process only")
        check_accept(recipe, remedy)
        check_memory(recipe, policy.config, policy.dtype, memory_of(policy.device))
        if recipe.loss.overlong_buffer > recipe.sampling.max_tokens:
            raise RunError(
                f"loss.overlong_buffer = {recipe.loss.overlong_buffer} is more than "
                f"sampling.max_tokens = {recipe.sampling.max_tokens}"
            )
        if recipe.warm_start.steps and recipe.warm_start.until and not recipe.eval.items:
            raise RunError("warm_start.until looks at held-out success: eval.items says of how many questions")
        unused = new_sampler(policy, recipe.sampling)
        requests = [] if self.supervised else self.questions.requests(0, self.questions.items(0))
        if recipe.eval.items:
            requests += self.questions.evaluation(self.questions.held_out())
        for request in requests:
            unused.add(request)
        if recipe.warm_start.steps or self.supervised:
            self.questions.solutions(0, 1, policy)

    def begin(self, say: Callable[[str], None]) -> dict[str, Any]:
        """What comes before the first step: the warm start, the trainer that reinforcement needs, the noise's size."""
        begin, line = perf_counter(), {}
        if self.recipe.warm_start.steps:
            trainer = self.trainer
            success = lambda: self.success(trainer.policy)["success"]  # noqa: E731
            line = WarmStart(self.recipe, self.questions, trainer, success, say).run()
            self.reinforce()
        found = self.dose(self.trainer.policy, 0)
        if found:
            say(dose_line(found))
        line = {**line, **found}
        return {**line, "seconds": perf_counter() - begin, "fingerprint": self.trainer.fingerprint()} if line else {}

    def dose(self, policy: Policy, step: int) -> dict[str, Any]:
        """Find the mismatch's size where it is not known; what was found, by name."""

        def ask(policy: Policy, first: int, count: int) -> list[Rollout]:
            return self.sample(policy, [request for _, request in self.questions.fresh(step, count, first)])

        return find_dose(self.mismatch, policy, step, ask, self.recipe)

    def reinforce(self) -> None:
        """Replace the warm start's trainer by one of the recipe's loss and optimizer, with the same masters, fresh
        moments, and version 0."""
        before, recipe = self.trainer, self.recipe
        self.trainer = Trainer(
            replace(before.policy, version=0),
            before.optimizer.masters,
            recipe.loss,
            recipe.optimizer,
            max_lag=largest_lag(recipe),
            remedy=remedy_of(recipe.loss.remedy),
            ranks=self.ranks,
        )
        self.versions.publish(0, self.trainer.policy)

    def step(self, step: int, display: Display) -> dict[str, Any]:
        """One round of the loop; what it measured, by name."""
        if self.supervised:
            return self.learn(step, display)
        recipe, begin, before = self.recipe, perf_counter(), self.trainer.policy
        clean = self.versions.policy(step)  # at the weights that sample, without what disturbs either side
        display.sampling(step)
        if recipe.mismatch.hold == "k3":
            self.dose(clean, step)
        sampler = self.mismatch.sampler(clean, step, self.versions.before(step))
        self.trainer.view = partial(self.mismatch.trainer, step=step)
        self.trainer.accepts, self.trainer.scores_all = {sampler.digest}, not recipe.mismatch.off
        self.trainer.disturb = partial(self.mismatch.gradients, kernels=self.trainer.kernels, step=step)
        found, scoring = self.gather(step, sampler, display)
        sampled = perf_counter()
        display.training(step)
        undoes = self.trainer.remedy is not None and self.trainer.remedy.can_undo
        place = self.trainer.policy.version if undoes else step  # a step taken back was none of the schedule
        self.trainer.optimizer.lr = learning_rate(recipe.optimizer, place, recipe.steps)
        advantages = self.trainer.advantages(found.rollouts, found.rewards, max_tokens=recipe.sampling.max_tokens)
        source = Source(exact=self.trainer.view(clean), sampler=sampler)
        due = recipe.run.diagnose and step % recipe.run.diagnose == 0
        diagnosis = Diagnosis(self.trainer, self.mismatch, partial(self.fresh, step)) if due else None
        seen = {} if diagnosis is None else diagnosis.before(found.rollouts, advantages.values, source)
        metrics = self.trainer.step(found.rollouts, advantages.values, source).measured()
        metrics.update({} if diagnosis is None else {**seen, **diagnosis.after(clean, step)})
        trained = perf_counter()
        metrics.update(lag_measures(sampler, before))
        lengths = length_measures(found.sampled)
        self.sampled = Sampled(
            rollouts=found.sampled,
            scores=joined(found.scores),
            trained=found.rollouts,
            advantages=advantages.values,
            scored=self.trainer.scored,
            replayed=self.trainer.replayed,
            decode=self.questions.tokenizer.decode,
        )
        return {
            **found.metrics(),
            "groups": advantages.groups,
            "zero_spread_groups": advantages.zero_spread,
            **metrics,
            "lr": self.trainer.optimizer.lr,
            "mismatch_sigma": self.mismatch.size(step) or 0.0,
            "remedy_after": self.obey(step, {**metrics, **lengths, f"{TIM}k3": self.sampled.discrepancy["k3"]}),
            **lengths,
            **time_measures(found.sampled, sampled - begin - scoring, scoring, trained - sampled),
            "fingerprint": self.trainer.fingerprint(),
        }

    def fresh(self, step: int) -> tuple[list[Rollout], Tensor]:
        """Exact on-policy rollouts of fresh questions, `run.diagnose_batch` times a step's, and their advantages."""
        recipe, policy = self.recipe, self.trainer.policy
        asked = self.questions.fresh(step, recipe.run.diagnose_batch * recipe.sampling.prompts)
        if not asked:
            return [], torch.empty(0)
        rollouts = self.sample(policy, [request for _, request in asked])
        items = {request.id: item for item, request in asked}
        scores = self.scoring.score(step, self.questions.answers(items, rollouts))
        return rollouts, self.trainer.advantages(rollouts, scores.rewards, recipe.sampling.max_tokens).values

    def learn(self, step: int, display: Display) -> dict[str, Any]:
        """One supervised step; what it measured, by name."""
        recipe, begin = self.recipe, perf_counter()
        display.training(step)
        self.trainer.optimizer.lr = learning_rate(recipe.optimizer, step, recipe.steps)
        metrics = learn(self.trainer, self.questions, step, recipe.sampling.prompts)
        self.versions.publish(step + 1, self.trainer.policy)
        line = supervised_line(metrics, self.trainer.optimizer.lr, perf_counter() - begin)
        return {**line, "fingerprint": self.trainer.fingerprint()}

    def gather(self, step: int, sampler: Policy, display: Display) -> tuple[Gathered, float]:
        """The rollouts of a step, and the seconds that their scores took."""
        seconds, remedy, every = 0.0, self.trainer.remedy, self.recipe.run.diagnose
        centred = (remedy is not None and remedy.centre is not None) or (every and step % every == 0)
        laws = bool(centred) and self.mismatch.keeps_laws(step)

        def sample(turn: int, count: int) -> tuple[list[Rollout], Scores]:
            nonlocal seconds
            items = self.questions.items(step, turn, count)
            requests = self.questions.requests(step, items, turn)
            asked = {request.id: item for request, item in zip(requests, items, strict=True)}
            rollouts = sample_shared(self.samplers.adopt(sampler, laws), requests, self.ranks, display.sampled)
            rollouts = self.mismatch.record(rollouts, step, sampler.ops.kernels)
            if turn == 0:
                rollouts = self.mismatch.flip(rollouts, step, sampler)
            begin = perf_counter()
            # All of a round together: some reward functions want them so.
            scores = self.scoring.score(step, self.questions.answers(asked, rollouts))
            seconds += perf_counter() - begin
            return rollouts, scores

        return gather(self.recipe.sampling, sample), seconds

    def sample(
        self, policy: Policy, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """Rollouts of that policy, in order of their ids."""
        return sample_shared(self.samplers.adopt(policy), requests, self.ranks, progress)

    def obey(self, step: int, metrics: dict[str, Any]) -> str:
        """Do what the remedy wants behind a step, and publish its weights, or those of before it."""
        remedy = self.trainer.remedy
        wanted = "none" if remedy is None else remedy.after_update(metrics)
        if wanted == "rollback":
            self.trainer.roll_back()
        if wanted == "sync":
            self.versions.sync(step + 1)
        self.versions.publish(step + 1, self.trainer.policy)
        self.samplers.adopt(self.versions.policy(step + 1))
        return wanted

    def evaluate(self, step: int) -> dict[str, Any]:
        """Held-out success behind a step where one is due, of the trainer's policy and of the next step's sampler."""
        section, done = self.recipe.eval, step + 1
        self.improved = False
        due = done in (0, self.recipe.steps) or (section.every and done % section.every == 0)
        if not section.items or not due:
            return {}
        policy = self.trainer.policy
        sampler = self.mismatch.sampler(self.versions.policy(done), done, self.versions.before(done))
        begin = perf_counter()
        of_trainer = self.success(policy)
        of_sampler = of_trainer if sampler is policy else self.success(sampler)
        self.improved = section.best and of_trainer["success"] > self.best
        self.best = max(self.best, of_trainer["success"])
        return {
            **{f"eval_{name}": value for name, value in of_trainer.items()},
            **{f"eval_sampler_{name}": value for name, value in of_sampler.items()},
            "eval_seconds": perf_counter() - begin,
        }

    def success(self, policy: Policy) -> dict[str, Any]:
        """Of a policy on the held-out questions, by name."""
        return evaluate(policy, self.questions, self.scoring, self.sample).metrics()

    def save(self, folder: Path) -> None:
        """The policy as a Hugging Face folder, in the dtype it computes in."""
        policy, model = self.trainer.policy, self.recipe.model.path
        save_folder(folder, policy.config, weights_of(policy), None if named_config(model) else model)


def save_best(loop: Loop, steps: int, folder: Path) -> None:
    """Save the policy as `best-STEPS`, then remove the best one before: whenever killed, a whole one is there."""
    name = f"best-{steps:06d}"
    remove_folder(folder / name)
    loop.save(folder / name)
    for other in folder.glob("best-*"):
        if other.name != name:
            remove_folder(other)


def load_trainer(
    recipe: Recipe,
    kernels: Kernels,
    say: Callable[[str], None],
    loss: LossSection | None = None,
    optimizer: OptimizerSection | None = None,
    **options: Any,
) -> Trainer:
    """The model of a recipe, ready to be trained. say: hears what was found in the checkpoint.

    loss, optimizer: by default the recipe's; the remedy is the loss's. options: further ones of Trainer.
    """
    path, dtype = recipe.model.path, DTYPES.get(recipe.model.dtype)
    config = named_config(path)
    if config is not None:
        weights = tiny_weights(config)
    else:
        config = ModelConfig.from_folder(path)
        weights = load_weights(path, config, dtype, say)
    loss, optimizer = loss or recipe.loss, optimizer or recipe.optimizer
    options.setdefault("remedy", remedy_of(loss.remedy))
    return Trainer.of(config, weights, kernels, dtype or config.dtype, loss, optimizer, **options)
