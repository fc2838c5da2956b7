"""`vexact eval`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from vexact.commands.model import load, name_of
from vexact.errors import BadInput
from vexact.loop.evaluation import Success, evaluate, sizes
from vexact.loop.questions import Questions
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tokenizer import load_tokenizer
from vexact.recipe import Recipe, load_recipe
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.tasks import Scoring, load_task

if TYPE_CHECKING:
    from vexact.cli import Eval

# Of a recipe of defaults, which is made for training.
DEFAULTS = {"eval.items": "100", "eval.max_tokens": "64"}
HELD_OUT = "0.1"  # share of the questions, where nothing says which are held out


def run(args: Eval, overrides: Sequence[str]) -> int:
    recipe = recipe_of(args, overrides)
    ks = args.k or tuple(sizes(recipe.eval.n))
    for k in ks:
        if not 1 <= k <= recipe.eval.n:
            raise BadInput(f"--k {k}: pass@k needs 1 to n completions of a question, and n is {recipe.eval.n}")
    policy = load(args.model, args.kernels(), None if recipe.model.dtype == "checkpoint" else recipe.model.dtype)
    task = load_task(recipe.task, recipe.seed)
    questions = Questions(recipe, task, load_tokenizer(args.model), policy.config)
    scoring = Scoring(task, recipe.task, recipe.seed)
    success = evaluate(policy, questions, scoring, lambda policy, requests: _sample(policy, requests, recipe))
    if args.json:
        print(json.dumps(_document(args, recipe, policy, success, ks), ensure_ascii=False, indent=1))
        return 0
    print(
        f"{recipe.task.name}: {len(success.successes)} held-out questions, {success.n} completions each, "
        f"temperature {recipe.eval.temperature:g}"
    )
    print(f"mean@{success.n}  {success.mean:.4f} ± {standard_error(success):.4f}")
    for k in ks:
        print(f"pass@{k}  {success.passed(k):.4f}")
    if success.failed:
        print(f"{success.failed} completions have a reward that failed")
    return 0


def recipe_of(args: Eval, overrides: Sequence[str]) -> Recipe:
    """The recipe, if any, under the flags, under the dotted keys. Raises BadInput."""
    flags = {
        "task.name": args.task or None,
        "eval.items": args.items,
        "eval.n": args.n,
        "eval.temperature": args.temperature,
        "eval.max_tokens": args.max_tokens,
        "seed": args.seed,
        "model.dtype": args.dtype,
    }
    words = [f"--{key}={value}" for key, value in flags.items() if value is not None]
    if args.recipe is None:
        if not args.task:
            raise BadInput("--task or --recipe is needed")
        defaults = [f"--{key}={value}" for key, value in DEFAULTS.items()]
        if not any(word.startswith(("--task.held_out", "--task.options.held_out_path")) for word in overrides):
            defaults.append(f"--task.held_out={HELD_OUT}")
        words = [*defaults, *words]
    words = [*words, f"--model.path={args.model}"]
    recipe = load_recipe(args.recipe, [*words, *overrides])
    if not recipe.eval.items:
        raise BadInput("eval.items is 0: --items says how many held-out questions are asked")
    return recipe


def standard_error(success: Success) -> float:
    """Of mean@n over the choice of questions: the standard deviation of their means (ddof 1) over √questions."""
    means = [right / success.n for right in success.successes]
    if len(means) < 2:
        return math.nan
    spread = math.fsum((mean - success.mean) ** 2 for mean in means) / (len(means) - 1)
    return math.sqrt(spread / len(means))


def _sample(policy: Policy, requests: Sequence[Request], recipe: Recipe) -> list[Rollout]:
    sampling, console = recipe.sampling, Console(stderr=True)
    sampler = Sampler(policy, tokens_per_step=sampling.tokens_per_step, chunk=sampling.chunk, running=sampling.running)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("sampling", total=sum(request.n for request in requests))
        return sampler.run(requests, lambda finished: progress.advance(task, finished))


def _document(args: Eval, recipe: Recipe, policy: Policy, success: Success, ks: Sequence[int]) -> dict[str, Any]:
    error = standard_error(success)
    return {
        "model": args.model,
        "dtype": name_of(policy.dtype),
        "digest": policy.digest,
        "task": recipe.task.name,
        "seed": recipe.seed,
        "items": len(success.successes),
        "n": success.n,
        "temperature": recipe.eval.temperature,
        "mean": success.mean,
        "standard_error": error if math.isfinite(error) else None,
        "pass_at": {str(k): success.passed(k) for k in ks},
        "successes": list(success.successes),
        "tokens": success.tokens,
        "truncated": success.truncated,
        "rewards_failed": success.failed,
    }
