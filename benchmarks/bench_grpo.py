"""A whole GRPO step beside TRL's GRPOTrainer on the real model: sample, reward, gradients, AdamW, new weights.

    python benchmarks/bench_grpo.py [--steps 5] [--model models/SmolLM2-135M-Instruct]

Same weights, prompts, group size, completion length (no side may stop early), loss and learning rate, on the same
threads. The two take turns: a step of vexact behind each step of TRL, in one process; the first of each is not counted.
TRL runs twice: with all in bfloat16 (weights and moments, under TRL's default bfloat16 autocast), and
with what vexact keeps (float32 weights and moments, bfloat16 autocast). Gradient checkpointing, on by default in TRL,
is off on both sides, and TRL takes the 32 completions as one micro-batch. Both are meant to favour TRL's speed, and
cost it memory. Peak memory is measured in processes of their own. Writes benchmarks/results/grpo.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from timing import environment
from vexact.model.checkpoint import load_weights
from vexact.model.config import ModelConfig
from vexact.model.tokenizer import load_tokenizer
from vexact.recipe import LossSection, OptimizerSection
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.training.trainer import Trainer
from vexact_kernels import load

RESULTS = Path(__file__).parent / "results" / "grpo.json"
MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
PROMPTS = tuple(f"Q: 3 + 4 = ?\nA: 7\nQ: 9 - 2 = ?\nA: 7\nQ: {i + 1} + {9 - i} = ?\nA:" for i in range(8))
SAMPLES, NEW, LR = 4, 16, 1e-6
KINDS = {"TRL, bfloat16 weights": "bfloat16", "TRL, float32 weights": "float32"}  # and their dtype
OURS = "vexact"


def rewards_of(completions: Sequence[Sequence[int]]) -> list[float]:
    """Something that differs between the samples of a group: the share of distinct tokens."""
    return [len(set(ids)) / len(ids) for ids in completions]


@dataclass
class Phases:
    """Seconds of the parts of one step of vexact."""

    sampling: float
    training: float


class Ours:
    """Sampler and Trainer, joined as vexact/loop/loop.py does."""

    def __init__(self, folder: Path) -> None:
        config, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
        loss = LossSection(name="ppo", advantage="group_std", aggregation="seq-mean-token-mean")
        optimizer = OptimizerSection(lr=LR, max_grad_norm=1.0)
        weights = load_weights(folder, config)
        self.trainer = Trainer.of(config, weights, load("cpu"), torch.bfloat16, loss, optimizer)
        self.sampler = Sampler(self.trainer.policy)
        self.prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        self.steps = 0

    def step(self) -> Phases:
        begin = time.perf_counter()
        first = self.steps << 32
        requests = [Request(first + i, ids, n=SAMPLES, max_tokens=NEW) for i, ids in enumerate(self.prompts)]
        rollouts = self.sampler.run(requests)
        sampled = time.perf_counter()
        rewards = rewards_of([rollout.completion for rollout in rollouts])
        advantages = self.trainer.advantages(rollouts, rewards, max_tokens=NEW)
        self.trainer.step(rollouts, advantages.values)
        self.sampler.adopt(self.trainer.policy)
        self.steps += 1
        return Phases(sampled - begin, time.perf_counter() - sampled)


def theirs(
    folder: Path, dtype: str, steps: int, between: Callable[[], object], prompts: Sequence[Sequence[int]] | None = None
) -> list[float]:
    """Seconds of each of TRL's steps. between: called behind each. prompts: the ids that TRL shall arrive at."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.begin = 0.0
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:  # behind the optimizer's step and zero_grad
            self.seconds.append(time.perf_counter() - self.begin)
            between()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if any(len(ids) != NEW for ids in completion_ids):
            raise RuntimeError(f"TRL made a completion that has not {NEW} tokens")
        return rewards_of(completion_ids)

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            model_init_kwargs={"dtype": dtype},
            use_cpu=True,
            bf16=True,
            per_device_train_batch_size=len(PROMPTS) * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=NEW,
            generation_kwargs={"min_new_tokens": NEW},
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch",
            gradient_checkpointing=False,
            max_steps=steps,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Dataset.from_list([{"prompt": prompt} for _ in range(steps) for prompt in PROMPTS])
        clock = Clock()
        trainer = GRPOTrainer(str(folder), reward, args=config, train_dataset=data, callbacks=[clock])
        if prompts is not None and trainer.processing_class(list(PROMPTS))["input_ids"] != [list(p) for p in prompts]:
            raise RuntimeError("TRL reads the prompts as other tokens")
        trainer.train()
    return clock.seconds


def measure(folder: Path, steps: int) -> list[dict[str, Any]]:
    """One row a kind of TRL, each beside steps of vexact that took turns with it."""
    ours, rows = Ours(folder), []
    for name, dtype in KINDS.items():
        phases: list[Phases] = []

        def turn(to: list[Phases] = phases) -> None:  # the default binds this kind's list
            to.append(ours.step())

        # Both first steps warm up and are left out.
        other = theirs(folder, dtype, steps + 1, turn, ours.prompts)[1:]
        whole = [phase.sampling + phase.training for phase in phases][1:]
        mine, median = statistics.median(whole), statistics.median(other)
        rows.append(
            {
                "beside": name,
                "vexact_seconds": mine,
                "vexact_sampling_seconds": statistics.median(phase.sampling for phase in phases[1:]),
                "vexact_training_seconds": statistics.median(phase.training for phase in phases[1:]),
                "trl_seconds": median,
                "ratio": median / mine,
                "ratio_of_fastest": min(other) / min(whole),
                "vexact_all": whole,
                "trl_all": other,
            }
        )
        print(f"{name}: {median:.1f} s, vexact {mine:.1f} s a step, ratio {median / mine:.2f}", flush=True)
    return rows


def peak_memory(folder: Path, what: str) -> float:
    """Peak resident GB of a fresh process that makes two steps."""
    command = [sys.executable, __file__, "--peak", what, "--model", str(folder)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def run_peak(folder: Path, what: str) -> None:
    if what == OURS:
        ours = Ours(folder)
        for _ in range(2):
            ours.step()
    else:
        theirs(folder, KINDS[what], 2, lambda: None)
    # Not getrusage: its maximum outlives exec, so it would report this process's parent.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1e6)


def show(rows: list[dict[str, Any]], memory: dict[str, float]) -> None:
    title = f"A GRPO step of {len(PROMPTS)} x {SAMPLES} x {NEW} tokens, SmolLM2-135M, {torch.get_num_threads()} threads"
    table = Table(title=title)
    for column in ("beside", "vexact s", "TRL s", "ratio", "vexact GB", "TRL GB"):
        table.add_column(column, justify="left" if column == "beside" else "right")
    for row in rows:
        sizes = (f"{memory[name]:.2f}" if name in memory else "" for name in (OURS, row["beside"]))
        times = (f"{row[key]:.2f}" for key in ("vexact_seconds", "trl_seconds", "ratio"))
        table.add_row(row["beside"], *times, *sizes)
    Console().print(table)


def write(rows: list[dict[str, Any]], memory: dict[str, float]) -> None:
    versions = {name: version(name) for name in ("trl", "transformers", "accelerate")}
    found = {"environment": {**environment(), **versions}, "rows": rows, "peak_memory_gb": memory}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each side")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--peak", choices=[OURS, *KINDS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if find_spec("trl") is None:
        print("bench_grpo.py compares with TRL, which is not installed: pip install trl")
        return  # not a failure: `make bench` goes on
    if arguments.peak:
        run_peak(arguments.model, arguments.peak)
        return
    rows = measure(arguments.model, arguments.steps)
    write(rows, {})
    memory = {} if arguments.no_memory else {what: peak_memory(arguments.model, what) for what in (OURS, *KINDS)}
    show(rows, memory)
    write(rows, memory)


if __name__ == "__main__":
    main()
