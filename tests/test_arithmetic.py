"""Functions of the host, against mpmath; ranks and deviations, against what they say."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import pytest

from vexact.arithmetic import at_rank, exp, expm1, log, log1p, log_complement, median_deviation, variance

Function = Callable[[np.ndarray], np.ndarray]


def ulps(ours: Function, exact: Callable[[mpmath.mpf], mpmath.mpf], x: np.ndarray) -> float:
    with mpmath.workdps(40):
        expected = [exact(mpmath.mpf(v)) for v in x.tolist()]
        found = ours(x).tolist()
        return max(float(abs(y - e) / np.spacing(abs(float(e)))) for y, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("ours, exact", [(exp, mpmath.exp), (expm1, mpmath.expm1)])
def test_the_exponential_is_within_two_ulps(ours: Function, exact: Callable[[mpmath.mpf], mpmath.mpf]) -> None:
    generator = np.random.default_rng(1)
    x = np.concatenate([generator.uniform(-40, 40, 300), generator.normal(0, 1e-5, 300), [0.0, 700.0, -700.0]])
    assert ulps(ours, exact, x) <= 2.0
    assert ours(np.array([-np.inf]))[0] == exact(-mpmath.inf)


def test_the_logarithm_is_within_two_ulps() -> None:
    generator = np.random.default_rng(2)
    x = np.concatenate([generator.uniform(1e-9, 3, 300), 1.0 + generator.normal(0, 1e-6, 300), [1.0, 1e-300, 1e300]])
    assert ulps(log, mpmath.log, x) <= 2.0
    assert log(np.array([0.0, 1.0])).tolist() == [-np.inf, 0.0]


def test_the_logarithm_beside_one_keeps_its_digits() -> None:
    generator = np.random.default_rng(3)
    x = np.concatenate([generator.uniform(-0.9, 3, 300), generator.normal(0, 1e-9, 300), [0.0, 0.25, -0.25, 1e6]])
    assert ulps(log1p, mpmath.log1p, x) <= 4.0
    naive = ulps(lambda v: log(1.0 + v), mpmath.log1p, x)
    assert naive > 1e6  # the mutant: 1 swallows what is beside it


def test_one_less_a_probability_keeps_its_digits_on_both_ends() -> None:
    generator = np.random.default_rng(4)
    x = -np.exp(generator.uniform(-18, 3.5, 600))
    assert ulps(log_complement, lambda v: mpmath.log(-mpmath.expm1(v)), x) <= 6.0
    assert log_complement(np.array([0.0]))[0] == -np.inf


def test_a_rank_is_one_of_the_values_and_no_mean_of_two() -> None:
    ordered = np.array([1.0, 2.0, 3.0, 10.0])
    assert [at_rank(ordered, share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 10, 10]
    assert median_deviation(np.array([1.0, 2.0, 3.0, 100.0])) == 1.0  # from 2: 1, 0, 1, 98
    assert variance(np.array([1.0, 3.0])) == 1.0
