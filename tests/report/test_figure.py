"""Scales: where values stand, and how axes are named."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from vexact.report.figure import LANE, Axis, Line, Panel, Points, Rule, Scale
from vexact.report.svg import draw


def test_exact_zero_has_a_lane_of_its_own_on_a_logarithmic_axis() -> None:
    scale = Scale.of(Axis("K3", log=True), [0.0, 1e-4, 1e-1])
    assert scale.share(0.0) < LANE < scale.share(1e-4) < scale.share(1e-1) <= 1.0
    assert scale.ticks()[0][1] == "0"
    without = Scale.of(Axis("K3", log=True), [1e-4, 1e-1])
    assert without.share(1e-4) < LANE, "without zeros there is no lane"


def test_an_axis_with_nothing_but_zero_says_so_and_invents_no_sizes() -> None:
    panel = Panel("k3", "K3", "d", Axis("step"), Axis("K3", log=True), (Line(0, "a", (0.0, 1.0), (0.0, 0.0)),))
    assert [name for _, name in panel.scales()[1].ticks()] == ["0"]
    assert "exactly zero throughout" in draw(panel, [0], many=False)
    other = Panel("k3", "K3", "d", Axis("step"), Axis("K3", log=True), (Line(0, "a", (0.0, 1.0), (0.0, 1e-9)),))
    assert "exactly zero throughout" not in draw(other, [0], many=False)


def test_what_never_came_stands_behind_every_step() -> None:
    scale = Scale.of(Axis("step", low=0.0, never="never"), [10.0, 60.0, math.inf])
    assert scale.share(60.0) < 1.0 - LANE < scale.share(math.inf)
    assert scale.ticks()[-1][1] == "never"
    shares = [share for share, _ in scale.ticks()]
    assert all(b - a > 0.12 for a, b in pairwise(shares)), "no two names on top of one another"
    assert math.isnan(Scale.of(Axis("step"), [1.0]).share(math.inf)), "an axis without the lane has no place for it"


@pytest.mark.parametrize(
    ("axis", "values", "names"),
    [
        (Axis("x", low=0.0, high=1.0), [0.3], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis("x"), [5.0, 5.0], ["4.6", "4.8", "5", "5.2", "5.4"]),
        (Axis("x"), [], ["0", "0.5", "1"]),
        (Axis("x"), [-3e-5, 3e-5], ["−2·10⁻⁵", "0", "2·10⁻⁵"]),
        (Axis("x", log=True), [1e-4, 1e-1], ["10⁻⁴", "10⁻³", "10⁻²", "10⁻¹"]),
        (Axis("x", log=True), [0.1, 3.0], ["0.1", "1"]),
        (Axis("x", log=True), [2.0, 4.0], ["2"]),
    ],
)
def test_axes_have_round_names(axis: Axis, values: list[float], names: list[str]) -> None:
    assert [name for _, name in Scale.of(axis, values).ticks()] == names


def test_names_of_rows_go_from_top_to_bottom() -> None:
    scale = Scale.of(Axis("", categories=("first", "second")), [])
    assert scale.share(0.0) > scale.share(1.0)


def test_a_line_breaks_where_a_value_is_missing() -> None:
    x, gap = (0.0, 1.0, 2.0, 3.0), (1.0, math.nan, 3.0, 2.0)
    panel = lambda y: Panel("p", "P", "d", Axis("step"), Axis("y"), (Line(0, "a", x, y),))  # noqa: E731
    path = lambda y: draw(panel(y), [0], many=False).split('class="line" d="')[1].split('"')[0]  # noqa: E731
    assert path(gap).count("M") == 2
    assert path((1.0, 2.0, 3.0, 2.0)).count("M") == 1
    assert "nan" not in draw(panel((math.nan,) * 4), [0], many=False)


def test_every_mark_is_within_the_frame() -> None:
    marks = (Points(0, "a", (1e-3, 0.0), (0.0, 1.0), (0.0, 0.5), (0.2, 1.0)), Rule("r", y=0.3), Rule("d"))
    panel = Panel("p", "P", "d", Axis("x", log=True), Axis("y", low=0.0, high=1.0), marks)
    x, y = panel.scales()
    assert all(0 <= x.share(value) <= 1 for value in (1e-3, 0.0))
    assert all(0 <= y.share(value) <= 1 for value in (0.0, 0.2, 0.5, 1.0))


def test_long_names_keep_their_ends() -> None:
    names = tuple(f"an arm with a name that is far too long for any chart, K3 {k3}" for k3 in ("0.001", "0.1"))
    marks = (Points(0, "a", (0.0, 1.0), (0.0, 1.0), across=True),)
    drawn = draw(Panel("p", "P", "d", Axis("x"), Axis("", categories=names), marks), [0], many=False)
    assert ", K3 0.001</text>" in drawn and ", K3 0.1</text>" in drawn and "an arm wi" in drawn
