"""Mathematical answers, judged by Hugging Face's math-verify: 1/2, 0.5 and \\frac{1}{2} are one answer."""

from __future__ import annotations

from vexact.tasks.task import TaskError

try:
    from math_verify import parse, verify
except ImportError:
    raise TaskError("math_verify needs the package math-verify: pip install 'math-verify[antlr4_13_2]'") from None


MARKS = ("$", "\\boxed", "\\(", "\\[")  # of mathematics within text


def math_reward(solution_str: str, ground_truth: str) -> float:
    """1 where the last answer that a completion holds equals the ground truth, else 0.

    A ground truth without a mark is mathematics as a whole. One that cannot be read raises ValueError: no completion
    could be right. The caller limits the time, as the package warns; its own alarms would take the place of that limit.
    """
    truth = str(ground_truth)
    marked = truth if any(mark in truth for mark in MARKS) else f"${truth}$"
    right = parse(marked, parsing_timeout=None)
    if not right:
        raise ValueError(f"{truth!r} cannot be read as mathematics")
    return float(verify(right, parse(solution_str, parsing_timeout=None), timeout_seconds=None))
