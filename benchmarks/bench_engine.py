"""The whole engine beside Hugging Face transformers on the real model: decode, scoring, training, peak memory.

    python benchmarks/bench_engine.py [--quick] [--model models/SmolLM2-135M-Instruct]

Both sides run in one process on the same threads and take turns; the table shows medians and their ratio. Peak memory
is measured in processes of their own. Writes benchmarks/results/engine.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from timing import environment, interleaved
from vexact.model.gradients import Gradients
from vexact.model.policy import Policy, Scored
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact_kernels import load

RESULTS = Path(__file__).parent / "results" / "engine.json"
MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
PROMPT, NEW = 2, 32  # tokens of a decode measurement: hardly a prompt, so that decoding is what is timed


def tokens(length: int, salt: int = 0) -> list[int]:
    """Plain ids of the vocabulary's frequent part."""
    return [(index * 7919 + salt * 104729) % 20000 + 100 for index in range(length)]


class Ours:
    """vexact's side of every measurement."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.policy = Policy.load(folder, load("cpu"), dtype)
        self.gradients = Gradients(self.policy.config, self.policy.ops.kernels)

    def decode(self, batch: int) -> None:
        requests = [Request(i, tokens(PROMPT, i), max_tokens=NEW) for i in range(batch)]
        Sampler(self.policy, tokens_per_step=4096).run(requests)

    def score(self, sequences: list[list[int]]) -> None:
        self.policy.logprobs([Scored(s, 1) for s in sequences])

    def train(self, sequences: list[list[int]]) -> None:
        self.gradients.clear()
        scored = [Scored(s, 1) for s in sequences]
        for _, result in self.policy.gradient_passes(scored, self.gradients):
            (-result.logprob.sum()).backward()


class Theirs:
    """transformers' side: generate, and a forward with log-probabilities of the same tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def decode(self, batch: int) -> None:
        ids = torch.tensor([tokens(PROMPT, i) for i in range(batch)])
        with torch.no_grad():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=NEW, min_new_tokens=NEW,
                pad_token_id=2,
            )  # fmt: skip

    def _logprobs(self, sequences: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor(sequences)
        logits = self.model(ids[:, :-1]).logits.float()
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def score(self, sequences: list[list[int]]) -> None:
        with torch.no_grad():
            self._logprobs(sequences)

    def train(self, sequences: list[list[int]]) -> None:
        self.model.zero_grad()
        (-self._logprobs(sequences).sum()).backward()


def measure(folder: Path, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """One row a kind of work: medians in seconds, tokens per second, ratio theirs / ours."""
    ours, theirs = Ours(folder, dtype), Theirs(folder, dtype)
    sequences = [tokens(129, i) for i in range(8)]
    work: dict[str, tuple[int, Callable[[], None], Callable[[], None]]] = {
        "decode, batch 1": (NEW, lambda: ours.decode(1), lambda: theirs.decode(1)),
        "decode, batch 64": (64 * NEW, lambda: ours.decode(64), lambda: theirs.decode(64)),
        "forward 8 x 128 with logprobs": (1024, lambda: ours.score(sequences), lambda: theirs.score(sequences)),
        "forward + backward 8 x 128": (1024, lambda: ours.train(sequences), lambda: theirs.train(sequences)),
    }
    rows = []
    for name, (count, mine, other) in work.items():
        medians = interleaved({"vexact": mine, "transformers": other}, seconds)
        rows.append(
            {
                "work": name,
                "dtype": str(dtype).removeprefix("torch."),
                "vexact_seconds": medians["vexact"],
                "transformers_seconds": medians["transformers"],
                "vexact_tokens_per_second": count / medians["vexact"],
                "transformers_tokens_per_second": count / medians["transformers"],
                "ratio": medians["transformers"] / medians["vexact"],
            }
        )
    return rows


def peak_memory(folder: Path, what: str) -> float:
    """Peak resident GB of a fresh process that does one kind of work in bf16."""
    command = [sys.executable, __file__, "--peak", what, "--model", str(folder)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def run_peak(folder: Path, what: str) -> None:
    if what == "generate":
        policy = Policy.load(folder, load("cpu"), torch.bfloat16)
        Sampler(policy).run([Request(0, tokens(PROMPT), max_tokens=64)])
    else:
        train_one_step(folder)
    # Not getrusage: its maximum outlives exec, so it would report this process's parent.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1e6)


def train_one_step(folder: Path) -> None:
    """A whole optimizer step on 32 rollouts: fp32 masters, AdamW moments, lanes, a published bf16 copy."""
    from vexact.model.checkpoint import load_weights
    from vexact.model.config import ModelConfig
    from vexact.recipe import OptimizerSection
    from vexact.training.trainer import Trainer

    config = ModelConfig.from_folder(folder)
    section = OptimizerSection(lr=1e-6)
    trainer = Trainer.of(config, load_weights(folder, config), load("cpu"), torch.bfloat16, optimizer=section)
    requests = [Request(i, tokens(96, i), n=4, max_tokens=32) for i in range(8)]
    rollouts = Sampler(trainer.policy).run(requests)
    trainer.step(rollouts, torch.linspace(-1, 1, len(rollouts)))


def show(rows: list[dict[str, Any]], memory: dict[str, float]) -> None:
    table = Table(title=f"SmolLM2-135M, {torch.get_num_threads()} threads, medians of interleaved runs")
    for column in ("work", "dtype", "vexact tok/s", "transformers tok/s", "ratio"):
        table.add_column(column, justify="left" if column in ("work", "dtype") else "right")
    for row in rows:
        table.add_row(
            row["work"],
            row["dtype"],
            f"{row['vexact_tokens_per_second']:.0f}",
            f"{row['transformers_tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)
    for what, size in memory.items():
        print(f"peak memory, {what}, bf16: {size:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--quick", action="store_true", help="bf16 only, five rounds each")
    parser.add_argument("--peak", choices=["generate", "train"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        run_peak(arguments.model, arguments.peak)
        return
    dtypes = [torch.bfloat16] if arguments.quick else [torch.bfloat16, torch.float32]
    rows = [row for dtype in dtypes for row in measure(arguments.model, dtype, 1.0 if arguments.quick else 20.0)]
    memory = {what: peak_memory(arguments.model, what) for what in ("generate", "train")}
    show(rows, memory)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"environment": environment(), "rows": rows, "peak_memory_gb": memory}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
