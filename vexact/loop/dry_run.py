"""What a recipe would need and whether it would run: memory by device, and one small step, without a run folder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vexact.loop.budget import Budget, budget_of, most_versions
from vexact.loop.loop import load_trainer
from vexact.loop.sharing import sample_shared
from vexact.loop.versions import largest_lag, memory_of, version_bytes
from vexact.model.checkpoint import load_weights, shapes
from vexact.model.config import DTYPES, ModelConfig
from vexact.model.known import known_config
from vexact.model.parameters import stack
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tiny import named_config, tiny_weights
from vexact.ranks import Ranks
from vexact.recipe import Recipe
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.remedies import remedy_of
from vexact.testing import compare_bits
from vexact.training.trainer import Trainer
from vexact_kernels import Kernels

PROMPTS, SAMPLES, PROMPT, COMPLETION = 2, 4, 8, 4  # a rollout for each lane
PAGES = 64
SPREAD = 0.02  # standard deviation of random weights


class RandomWeights(dict[str, Tensor]):
    """Tensors of a model's shape, each made when it is asked for, always the same: they never stand in memory whole."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config, self._shapes = config, shapes(config)

    def __missing__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._config.dtype)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(SPREAD).to(self._config.dtype)


def dry_run(recipe: Recipe, kernels: Kernels | None, console: Console, ranks: Ranks | None = None) -> None:
    """Print a table of memory, then sample and train 8 short rollouts as far as memory goes; no folder is written.

    kernels: None where the recipe's device is not here; then there is the table only. Weights are the recipe's, or
    random ones where its folder is missing and its name is known (`known_config`). Raises ConfigError or
    CheckpointError where neither is the case.
    """
    ranks = ranks or Ranks()
    console = console if ranks.first else Console(quiet=True)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False)

    config, is_random = shape_of(recipe)
    dtype = DTYPES.get(recipe.model.dtype) or config.dtype
    budget = budget_of(recipe, config, dtype, ranks.size)
    console.print(table(recipe, config, budget, ranks.size))
    if kernels is None:
        say(f"device {recipe.device} is not here: nothing was run; try --device cpu --profile portable")
        return
    # Ranks on one CPU share its memory; each has a GPU of its own.
    sharing = ranks.size if kernels.device.type == "cpu" else 1
    free = min(ranks.gather(free_memory(kernels.device))) // sharing
    forward_only = version_bytes(config, dtype) * 2 + (1 << 30)
    say(f"weights: {'random, ' + recipe.model.path + ' is not there' if is_random else recipe.model.path}")
    if budget.total <= free:
        trainer = _trainer(recipe, config, kernels, dtype, ranks, is_random, say)
        _train(trainer, _sampled(trainer.policy, ranks, say), say)
    elif forward_only <= free:
        say(f"a step needs {_size(budget.total)}, of which {_size(free)} are free: sampled and scored only")
        _sampled(_policy(recipe, config, kernels, dtype, is_random, say), ranks, say)
    else:
        say(f"weights alone need {_size(forward_only)}, of which {_size(free)} are free: nothing was run")


def shape_of(recipe: Recipe) -> tuple[ModelConfig, bool]:
    """The model's shape, and whether its weights will have to be random."""
    path = recipe.model.path
    named, known = named_config(path), known_config(path)
    if named is not None:
        return named, False
    if known is not None and not Path(path).exists():
        return known, True
    return ModelConfig.from_folder(path), False


def table(recipe: Recipe, config: ModelConfig, budget: Budget, ranks: int) -> Table:
    """What a device holds, and how much of it."""
    sampling, parameters = recipe.sampling, sum(map(math.prod, shapes(config).values()))
    rows = Table(title=f"{recipe.name}: memory of each of {ranks} device{'s' * (ranks > 1)}", title_justify="left")
    rows.add_column("what")
    rows.add_column("size", justify="right")
    for name, size in budget.parts.items():
        rows.add_row(name, _size(size))
    rows.add_section()
    rows.add_row("together", _size(budget.total))
    rows.add_section()
    rows.add_row("parameters", f"{parameters:,}")
    rows.add_row("versions held, the next one among them", str(most_versions(recipe)))
    rows.add_row("oldest sampler, in versions", str(largest_lag(recipe)))
    if recipe.objective == "sft":
        rows.add_row("solutions of a step", str(sampling.prompts))
    else:
        rows.add_row("rollouts of a step", f"{sampling.prompts} × {sampling.samples}")
    rows.add_row("updates of a step", str(recipe.loss.epochs * recipe.loss.mini_batches))
    return rows


def free_memory(device: torch.device) -> int:
    """Bytes that may still be used."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = memory_of(device)
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = min(free, 1024 * int(lines["MemAvailable"].split()[0]))
    limit = group / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int((group / "memory.current").read_text()))
    return max(0, free)


def _trainer(
    recipe: Recipe,
    config: ModelConfig,
    kernels: Kernels,
    dtype: torch.dtype,
    ranks: Ranks,
    is_random: bool,
    say: Callable[[str], None],
) -> Trainer:
    if not is_random:
        return load_trainer(recipe, kernels, say, ranks=ranks)
    remedy = remedy_of(recipe.loss.remedy)
    return Trainer.of(
        config, RandomWeights(config), kernels, dtype, recipe.loss, recipe.optimizer, ranks=ranks, remedy=remedy
    )


def _policy(
    recipe: Recipe,
    config: ModelConfig,
    kernels: Kernels,
    dtype: torch.dtype,
    is_random: bool,
    say: Callable[[str], None],
) -> Policy:
    if is_random:
        weights: dict[str, Tensor] = RandomWeights(config)
    elif named_config(recipe.model.path) is not None:
        weights = tiny_weights(config)
    else:
        weights = load_weights(recipe.model.path, config, dtype, say)
    return Policy.build(config, lambda name: stack(config, weights, name), kernels, dtype)


def _sampled(policy: Policy, ranks: Ranks, say: Callable[[str], None]) -> list[Rollout]:
    """Short rollouts, scored again."""
    begin = perf_counter()
    prompts = [[(7 + i * PROMPT + j) % policy.config.vocab_size for j in range(PROMPT)] for i in range(PROMPTS)]
    requests = [Request(id=i, prompt=prompts[i], n=SAMPLES, max_tokens=COMPLETION) for i in range(PROMPTS)]
    rollouts = sample_shared(Sampler(policy, pages=PAGES), requests, ranks)
    tokens = [rollout for rollout in rollouts if rollout.completion]
    scored = policy.logprobs([rollout.scored for rollout in tokens]).logprob.cpu()
    found = compare_bits(torch.cat([rollout.logprobs for rollout in tokens]), scored)
    say(
        f"forward: {found.compared} tokens sampled and scored again, {found.differ} differ; version {policy.version}, "
        f"digest {policy.digest}, {perf_counter() - begin:.1f} s"
    )
    return rollouts


def _train(trainer: Trainer, rollouts: list[Rollout], say: Callable[[str], None]) -> None:
    begin = perf_counter()
    metrics = trainer.step(rollouts, torch.tensor([1.0, -1.0] * (len(rollouts) // 2)))
    trainer.shards.ranks.agree("weights fingerprint", trainer.fingerprint())
    say(
        f"step: {metrics.tokens} tokens trained, mismatch {metrics.mismatch_tokens} of {metrics.mismatch_compared}, "
        f"grad norm {metrics.grad_norm:.4g}, version {metrics.version}, {perf_counter() - begin:.1f} s"
    )


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 28 else f"{count / (1 << 20):.1f} MiB"
