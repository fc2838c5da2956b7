"""Curves of seeds together, and what thinning may lose of them."""

from __future__ import annotations

import math

import pytest

from vexact.report.curve import Band, Curve, spread


def test_a_band_is_the_range_and_the_median_of_the_seeds_that_have_the_step() -> None:
    a, b, c = (Curve.of([(0, low), (1, 2 * low)]) for low in (1.0, 5.0, 3.0))
    longer = Curve.of([(0, 4.0), (1, 4.0), (2, 9.0)])
    band = Band.of([a, b, c, longer])
    assert band.steps == (0, 1, 2)
    assert (band.low, band.middle, band.high) == ((1.0, 2.0, 9.0), (3.5, 5.0, 9.0), (5.0, 10.0, 9.0))
    assert band.counts == (4, 4, 1)


def test_values_that_are_not_finite_are_counted_and_not_drawn() -> None:
    curve = Curve.of([(2, math.nan), (1, 1.0), (0, math.inf), (3, 2.0)])
    assert (curve.steps, curve.values, curve.lost) == ((1, 3), (1.0, 2.0), 2)


def test_thinning_loses_no_spike() -> None:
    spike = Curve.of([(step, 100.0 if step == 501 else 1.0) for step in range(1000)])
    thin = Band.of([spike]).thinned(40)
    assert len(thin.steps) == 40 and thin.steps[-1] == 999
    assert max(thin.high) == 100.0
    every = 1000 // 40  # what a stride would have kept
    assert max(spike.values[::every]) == 1.0, "the counter-example: a stride does lose it"


def test_a_short_band_stays_as_it_is() -> None:
    band = Band.of([Curve.of([(0, 1.0), (1, 2.0)])])
    assert band.thinned(2) is band and not band.wide


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, math.nan, 3.0], (1.0, 2.0, 3.0)), ([math.inf, 1.0], (1.0, 1.0, 1.0)), ([math.inf], (math.inf,) * 3)],
)
def test_a_spread_leaves_out_what_is_missing(values: list[float], expected: tuple[float, ...]) -> None:
    assert spread(values) == expected


def test_a_spread_of_nothing_is_no_number() -> None:
    assert all(math.isnan(value) for value in spread([math.nan]))


def test_the_end_is_the_median_of_the_last_fifth_and_first_below_its_first_step() -> None:
    curve = Curve.of([(step, 1.0 - step / 10) for step in range(10)])
    assert curve.end() == pytest.approx(0.15)
    assert curve.first_below(0.5) == 6 and curve.first_below(-1.0) == math.inf
    assert math.isnan(Curve().end()) and math.isnan(Curve().first_below(1.0))
