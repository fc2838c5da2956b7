"""A whole GRPO step beside TRL's GRPOTrainer on the real model: sample, reward, gradients, AdamW, new weights.

    python benchmarks/bench_grpo.py [--steps 3] [--model models/SmolLM2-135M-Instruct]

Same weights, prompts, group size, completion length (no side may stop early), loss and learning rate, on the same
number of threads. Each side is a process of its own, so that its peak memory is its own, and the two take turns: a step
of one while the other waits. The first step of each is not counted. Two ways to cut the step, which change no bit of
ours:

- *fast*: all 32 completions at once, every activation kept;
- *small*: micro-batches of 8 completions and gradient checkpointing, TRL's defaults; here as many tokens at once, and
  layers that run again on the way back (`optimizer.recompute`).

TRL runs with all in bfloat16 (weights and moments, under TRL's default bfloat16 autocast), and with what vexact keeps
(float32 weights and moments, bfloat16 autocast). The processor's seconds stand beside the clock's: other work on the
machine lengthens the clock's alone. Writes benchmarks/results/grpo.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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
CUT = 8  # completions of a micro-batch of TRL's, by default
WAYS = ("fast", "small")
WEIGHTS = ("bfloat16", "float32")  # that TRL keeps
OURS, TRL = "vexact", "trl"


def rewards_of(completions: Sequence[Sequence[int]]) -> list[float]:
    """Something that differs between the samples of a group: the share of distinct tokens."""
    return [len(set(ids)) / len(ids) for ids in completions]


@dataclass
class Phases:
    """Seconds of the parts of one step (TRL's is one part), and those that the processor spent on all of it."""

    sampling: float
    training: float
    processor: float

    @property
    def whole(self) -> float:
        return self.sampling + self.training


class Ours:
    """Sampler and Trainer, joined as vexact/loop/loop.py does."""

    def __init__(self, folder: Path, way: str) -> None:
        config, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
        self.prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        loss = LossSection(name="ppo", advantage="group_std", aggregation="seq-mean-token-mean")
        optimizer = OptimizerSection(lr=LR, max_grad_norm=1.0)
        if way == "small":
            cut = CUT * (max(map(len, self.prompts)) + NEW)
            optimizer = replace(optimizer, tokens_at_once=cut, recompute=True)
        weights = load_weights(folder, config)
        self.trainer = Trainer.of(config, weights, load("cpu"), torch.bfloat16, loss, optimizer)
        self.sampler = Sampler(self.trainer.policy)
        self.steps = 0

    def step(self) -> Phases:
        begin, spent = time.perf_counter(), time.process_time()
        first = self.steps << 32
        requests = [Request(first + i, ids, n=SAMPLES, max_tokens=NEW) for i, ids in enumerate(self.prompts)]
        rollouts = self.sampler.run(requests)
        sampled = time.perf_counter()
        rewards = rewards_of([rollout.completion for rollout in rollouts])
        advantages = self.trainer.advantages(rollouts, rewards, max_tokens=NEW)
        self.trainer.step(rollouts, advantages.values)
        self.sampler.adopt(self.trainer.policy)
        self.steps += 1
        return Phases(sampled - begin, time.perf_counter() - sampled, time.process_time() - spent)


def theirs(folder: Path, way: str, dtype: str, steps: int, behind: Callable[[Phases], object]) -> None:
    """Steps of TRL's trainer. behind: hears what each took."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.begin = self.spent = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin, self.spent = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:  # behind the optimizer's step and zero_grad
            behind(Phases(0.0, time.perf_counter() - self.begin, time.process_time() - self.spent))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if any(len(ids) != NEW for ids in completion_ids):
            raise RuntimeError(f"TRL made a completion that has not {NEW} tokens")
        return rewards_of(completion_ids)

    whole = len(PROMPTS) * SAMPLES
    tokenizer = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            model_init_kwargs={"dtype": dtype},
            use_cpu=True,
            bf16=True,
            per_device_train_batch_size=whole if way == "fast" else CUT,
            gradient_accumulation_steps=1 if way == "fast" else whole // CUT,
            gradient_checkpointing=way == "small",
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
            max_steps=steps,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Dataset.from_list([{"prompt": prompt} for _ in range(steps) for prompt in PROMPTS])
        trainer = GRPOTrainer(str(folder), reward, args=config, train_dataset=data, callbacks=[Clock()])
        read = trainer.processing_class(list(PROMPTS))["input_ids"]
        if read != [list(tokenizer.encode(prompt)) for prompt in PROMPTS]:
            raise RuntimeError("TRL reads the prompts as other tokens")
        trainer.train()


def serve(side: str, folder: Path, way: str, dtype: str, steps: int) -> None:
    """One side: a step for each line that arrives, and a line of JSON for each step."""
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may speak there
    sys.stdin.readline()

    def behind(phases: Phases) -> None:
        # Not getrusage: its maximum outlives exec, so it would report this process's parent.
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1e6
        print(json.dumps({**asdict(phases), "peak_gb": peak}), file=answers, flush=True)
        sys.stdin.readline()

    if side == OURS:
        ours = Ours(folder, way)
        for _ in range(steps):
            behind(ours.step())
    else:
        theirs(folder, way, dtype, steps, behind)


class Side:
    """The process of one side."""

    def __init__(self, side: str, folder: Path, way: str, dtype: str, steps: int) -> None:
        self.phases: list[Phases] = []
        self.peak = 0.0
        command = [sys.executable, __file__, "--serve", side, way, dtype, "--model", str(folder)]
        self._process = subprocess.Popen(
            [*command, "--steps", str(steps)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("a side has no pipes")
        stdin.write("\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise RuntimeError("a side ended before its last step")
        found = json.loads(answer)
        self.peak = max(self.peak, found.pop("peak_gb"))
        self.phases.append(Phases(**found))

    def end(self) -> None:
        self._process.communicate("\n")


def measure(folder: Path, steps: int) -> list[dict[str, Any]]:
    """One row a way and kind of TRL, each beside steps of vexact that took turns with it."""
    rows = []
    for way in WAYS:
        for dtype in WEIGHTS:
            ours, trl = (Side(side, folder, way, dtype, steps + 1) for side in (OURS, TRL))
            for _ in range(steps + 1):
                ours.step()
                trl.step()
            ours.end()
            trl.end()
            rows.append(row(way, dtype, ours, trl))
            print(
                f"{way}, TRL's weights {dtype}: {rows[-1]['trl_seconds']:.1f} s, vexact "
                f"{rows[-1]['vexact_seconds']:.1f} s a step, ratio {rows[-1]['ratio']:.2f}",
                flush=True,
            )
    return rows


def row(way: str, dtype: str, ours: Side, trl: Side) -> dict[str, Any]:
    """The first steps warm up and are left out."""
    mine, other = ours.phases[1:], trl.phases[1:]
    median = statistics.median(phase.whole for phase in mine)
    of_trl = statistics.median(phase.whole for phase in other)
    return {
        "way": way,
        "trl_weights": dtype,
        "vexact_seconds": median,
        "vexact_sampling_seconds": statistics.median(phase.sampling for phase in mine),
        "vexact_training_seconds": statistics.median(phase.training for phase in mine),
        "trl_seconds": of_trl,
        "ratio": of_trl / median,
        "ratio_of_fastest": min(phase.whole for phase in other) / min(phase.whole for phase in mine),
        "vexact_processor_seconds": statistics.median(phase.processor for phase in mine),
        "trl_processor_seconds": statistics.median(phase.processor for phase in other),
        "vexact_peak_gb": ours.peak,
        "trl_peak_gb": trl.peak,
        "vexact_all": [phase.whole for phase in mine],
        "trl_all": [phase.whole for phase in other],
    }


def show(rows: list[dict[str, Any]]) -> None:
    title = f"A GRPO step of {len(PROMPTS)} x {SAMPLES} x {NEW} tokens, SmolLM2-135M, {torch.get_num_threads()} threads"
    table = Table(title=title)
    columns = ("vexact s", "TRL s", "ratio", "vexact processor s", "TRL processor s", "vexact GB", "TRL GB")
    for column in ("way", "TRL's weights", *columns):
        table.add_column(column, justify="left" if column in ("way", "TRL's weights") else "right")
    times = ("vexact_seconds", "trl_seconds", "ratio", "vexact_processor_seconds", "trl_processor_seconds")
    for one in rows:
        table.add_row(
            one["way"], one["trl_weights"], *(f"{one[key]:.2f}" for key in (*times, "vexact_peak_gb", "trl_peak_gb"))
        )
    Console().print(table)


def write(rows: list[dict[str, Any]], load_before: float) -> None:
    versions = {name: version(name) for name in ("trl", "transformers", "accelerate")}
    loads = {"load_before": load_before, "load_behind": os.getloadavg()[0], "cores": os.cpu_count()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"environment": {**environment(), **versions, **loads}, "rows": rows}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each side")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if find_spec("trl") is None:
        print("bench_grpo.py compares with TRL, which is not installed: pip install trl")
        return  # not a failure: `make bench` goes on
    if arguments.serve:
        side, way, dtype = arguments.serve
        serve(side, arguments.model, way, dtype, arguments.steps)
        return
    begin = os.getloadavg()[0]
    rows = measure(arguments.model, arguments.steps)
    show(rows)
    write(rows, begin)


if __name__ == "__main__":
    main()
