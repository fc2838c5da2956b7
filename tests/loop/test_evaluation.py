"""mean@n and pass@k: exact counts against enumeration, and the same answer whenever the same policy is asked."""

from __future__ import annotations

from itertools import combinations

import pytest

from vexact.loop.evaluation import Success, pass_at, sizes


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_of_k_that_hold_a_right_one(n: int) -> None:
    for right in range(n + 1):
        outcomes = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            draws = list(combinations(outcomes, k))
            assert pass_at(n, right, k) == sum(map(any, draws)) / len(draws)


def test_pass_at_k_is_unbiased_where_the_plug_in_estimate_is_not() -> None:
    """Over all outcomes of n completions that are right with probability 1/4 each."""
    n, k, p = 6, 3, 0.25
    mean = biased = 0.0
    for code in range(2**n):
        right = code.bit_count()
        weight = p**right * (1 - p) ** (n - right)
        mean += weight * pass_at(n, right, k)
        biased += weight * (1 - (1 - right / n) ** k)
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(biased - (1 - (1 - p) ** k)) > 0.02


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_cannot_be_estimated_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from {right} of {n}"):
        pass_at(n, right, k)


def test_large_counts_are_exact() -> None:
    assert pass_at(1000, 1, 500) == 0.5
    assert pass_at(2000, 2000, 1) == 1.0


def test_the_sizes_are_powers_of_two_and_the_number_of_completions() -> None:
    assert [sizes(n) for n in (1, 2, 3, 8, 10)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 10]]


def test_success_is_a_share_of_completions() -> None:
    success = Success(n=4, successes=[4, 1, 0], tokens=60, truncated=3, failed=2)
    assert success.mean == 5 / 12
    assert success.passed(1) == pytest.approx(5 / 12)
    assert success.metrics() == {
        "success": 5 / 12,
        "pass_at_2": pytest.approx((1 + 0.5 + 0) / 3),
        "pass_at_4": pytest.approx(2 / 3),
        "length_mean": 5.0,
        "truncated": 0.25,
        "rewards_failed": 2,
    }
