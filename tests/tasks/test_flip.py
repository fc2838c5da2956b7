"""Flips: a function of their address, as frequent as asked, and never a draw of a token."""

from __future__ import annotations

import itertools
import math

import pytest

from vexact.tasks.flip import flipped


def pattern(p: float = 0.5, **fixed: int) -> list[bool]:
    """Flips of 128 rollouts with one part of their addresses fixed."""
    address = {"seed": 3, "step": 5, "request": 7, "sample": 2, **fixed}
    varied = next(name for name in ("sample", "request", "step", "seed") if name not in fixed)
    return [flipped(**{**address, varied: i}, p=p) for i in range(128)]


def test_a_flip_is_a_function_of_its_address() -> None:
    assert pattern() == pattern()
    reference = pattern(seed=3, step=5, request=7)
    for name, value in (("seed", 4), ("step", 6), ("request", 8), ("seed", 3 + 2**40), ("request", 7 + 2**40)):
        other = pattern(**{"seed": 3, "step": 5, "request": 7, name: value})
        assert 30 < sum(a != b for a, b in zip(reference, other, strict=True)) < 98, name  # half of 128, six deviations
    assert 30 < sum(reference) < 98  # samples of one request part


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_flips_are_as_frequent_as_asked(p: float) -> None:
    draws = 8192
    found = sum(
        flipped(11, step, request, sample, p)
        for step, request, sample in itertools.product(range(8), range(128), range(8))
    )
    assert abs(found - p * draws) < 5 * math.sqrt(draws * p * (1 - p))


def test_more_flips_hold_all_of_the_fewer() -> None:
    few, many = pattern(0.2), pattern(0.4)
    assert few != many and all(b for a, b in zip(few, many, strict=True) if a)


def test_the_ends_are_never_and_always() -> None:
    assert not any(pattern(0.0)) and all(pattern(1.0))


@pytest.mark.parametrize(("bits", "expected"), [(2**63 - 1, True), (2**63, False), (0, True), (2**64 - 1, False)])
def test_integers_are_compared(bits: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, 2^63 - 1 is 2^63 and would not be flipped at one half."""
    monkeypatch.setattr("vexact.tasks.flip.draw_bits", lambda *address: bits)
    assert flipped(0, 0, 0, 0, 0.5) is expected


def test_no_flip_has_the_address_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[int] = []

    def noted(seed: int, request: int, sample: int, position: int) -> int:
        positions.append(position)
        return 0

    monkeypatch.setattr("vexact.tasks.flip.draw_bits", noted)
    for step in (0, 1, 2**31 - 1):
        flipped(0, step, 0, 0, 0.5)
    assert positions == [2**31, 2**31 + 1, 2**32 - 1]  # a model's positions end far below


@pytest.mark.parametrize(("p", "step"), [(-0.1, 0), (1.1, 0), (math.nan, 0), (0.5, -1), (0.5, 2**31)])
def test_no_probability_and_no_step_is_refused(p: float, step: int) -> None:
    with pytest.raises(ValueError, match="must lie in 0"):
        flipped(0, step, 0, 0, p)
