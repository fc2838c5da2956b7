"""What a person sees fits on a line."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from vexact.loop.display import Display

LARGE = {
    "step": 1233, "reward_mean": -0.123, "groups": 128, "zero_spread_groups": 0, "mismatch_tokens": 0,
    "mismatch_compared": 99_999, "lag": 0, "grad_norm": 0.000123, "sampling_tokens_per_second": 12_345.6,
    "training_tokens_per_second": 123_456.7, "seconds": 123.4, "skipped": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "widest"),
    [({"step": 3, "groups": 8, "mismatch_compared": 864, "grad_norm": 1.25, "seconds": 4.2}, 100), ({}, 120)],
)
def test_a_step_is_a_line_of_plain_text(changes: dict[str, Any], widest: int) -> None:
    out = io.StringIO()
    steps = 4 if changes else 2000
    Display(Console(file=out, width=80), steps, 12).stepped({**LARGE, **changes})
    assert out.getvalue().count("\n") == 1
    assert len(out.getvalue()) <= widest


@pytest.mark.parametrize(("rate", "text"), [(870.4, "870"), (3710.0, "3.7k"), (13_643.0, "14k")])
def test_rates_are_short(rate: float, text: str) -> None:
    out = io.StringIO()
    Display(Console(file=out, width=80), 9, 12).stepped({**LARGE, "sampling_tokens_per_second": rate})
    assert f"sample {text}, train" in out.getvalue()
