"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Line = Mapping[str, Any]


class Display:
    """steps of a run, each with a known number of rollouts and one training step behind them."""

    def __init__(self, console: Console, steps: int, rollouts: int) -> None:
        self._console, self._steps, self._rollouts = console, steps, rollouts
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._bar = self._progress.add_task("", total=rollouts)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def sampling(self, step: int) -> None:
        self._progress.reset(self._bar, description=f"step {step + 1}/{self._steps}: sampling", total=self._rollouts)

    def sampled(self, count: int) -> None:
        """That many rollouts are finished."""
        self._progress.advance(self._bar, count)

    def training(self, step: int) -> None:
        self._progress.update(self._bar, description=f"step {step + 1}/{self._steps}: training")

    def stepped(self, line: Line) -> None:
        """line: of a step, or of what came before the first one."""
        if line["step"] >= 0:
            self._step(line)
        if "eval_success" in line:
            self._console.print(_evaluation(line, self._steps), soft_wrap=True, highlight=False)

    def _step(self, line: Line) -> None:
        """At most 100 columns, unless there is something to be said about the step."""
        skipped = f"  skipped: {line['skipped']}" if line["skipped"] else ""
        self._console.print(
            f"step {line['step'] + 1}/{self._steps}  {_found(line)}  grad {line['grad_norm']:.2g}  {_speed(line)}  "
            f"{line['seconds']:.1f} s{skipped}",
            soft_wrap=True,
            highlight=False,
        )


def _found(line: Line) -> str:
    """What a step found: a supervised one has neither rewards nor mismatch."""
    if "reward_mean" not in line:
        return f"loss {line['loss']:.3f}"
    lag = f"  lag {line['lag']}" if line["lag"] else ""
    return (
        f"reward {line['reward_mean']:.3f}  spread {line['groups'] - line['zero_spread_groups']}/{line['groups']}  "
        f"mismatch {line['mismatch_tokens']}/{line['mismatch_compared']}{lag}"
    )


def _speed(line: Line) -> str:
    training = f"train {_short(line['training_tokens_per_second'])} tok/s"
    if "sampling_tokens_per_second" not in line:
        return training
    return f"sample {_short(line['sampling_tokens_per_second'])}, {training}"


def _short(rate: float) -> str:
    """870, 3.7k, 14k."""
    return f"{rate:.0f}" if rate < 1000 else f"{rate / 1000:.{1 if rate < 10000 else 0}f}k"


def summary(lines: Sequence[Line], folder: Path) -> Table:
    """The run in a few rows."""
    table = Table(show_header=False, title="run", title_justify="left")
    measured = [line for line in lines if "eval_success" in line]
    lines = [line for line in lines if line["step"] >= 0]
    if measured:
        best = max(measured, key=lambda line: line["eval_success"])
        table.add_row(
            "held-out success",
            f"{measured[0]['eval_success']:.3f} → {measured[-1]['eval_success']:.3f}, "
            f"best {best['eval_success']:.3f} behind step {best['step'] + 1}",
        )
    if lines:
        first, last = lines[0], lines[-1]
        if "reward_mean" in last:
            tokens, mismatch = (sum(line[key] for line in lines) for key in ("mismatch_compared", "mismatch_tokens"))
            largest = max(line["mismatch_max"] for line in lines)
            low, high = min(line["ratio_min"] for line in lines), max(line["ratio_max"] for line in lines)
            table.add_row("reward", f"{first['reward_mean']:.3f} → {last['reward_mean']:.3f}")
            table.add_row("mismatch", f"{mismatch} of {tokens} tokens, largest |Δ logprob| {largest:g}")
            table.add_row("importance ratios", f"{low:g} … {high:g}")
        else:
            table.add_row("loss", f"{first['loss']:.3f} → {last['loss']:.3f}")
        table.add_row("time", f"{sum(line['seconds'] for line in lines):.1f} s for {len(lines)} steps")
        table.add_row("weights", f"version {last['version']}, {last['fingerprint'][:16]}")
    table.add_row("folder", str(folder))
    return table


def _evaluation(line: Line, steps: int) -> str:
    sampler = line["eval_sampler_success"]
    passed = [(key, line[key]) for key in line if key.startswith("eval_pass_at_")]
    return (
        f"step {line['step'] + 1}/{steps}  held-out success {line['eval_success']:.3f}"
        + "".join(f"  pass@{key.rpartition('_')[2]} {value:.3f}" for key, value in passed)
        + (f"  sampler {sampler:.3f}" if sampler != line["eval_success"] else "")
        + f"  {line['eval_seconds']:.1f} s"
    )
