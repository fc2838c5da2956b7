"""What a chart shows, in the units of its data. `svg` and `png` draw it; both place by `Scale`, so they agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

LANE = 0.13  # of a logarithmic axis, for values that are exactly zero, or that never come
SHAPES = ("circle", "square", "triangle", "diamond", "down", "cross", "plus", "ring")
SLOTS = len(SHAPES)  # colours, dashes and shapes that arms are told apart by


@dataclass(frozen=True)
class Line:
    """A line of an arm, with the range of its seeds around it where that is wide. arm: its number in the study, or -1
    for what belongs to none. step: drawn as stairs. A NaN breaks it."""

    arm: int
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    stairs: bool = False


@dataclass(frozen=True)
class Grey:
    """The range of the null arms: between low and high at each x, or, with two x at the ends, a stripe."""

    label: str
    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Points:
    """Marks of an arm, each with a bar over its range where one is given. shape: of SHAPES. hollow: empty inside."""

    arm: int
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    shape: str = SHAPES[0]
    hollow: bool = False
    across: bool = False  # the bar lies along x
    tips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A straight line for comparison: along x where `y` is given, along y where `x` is, or the diagonal."""

    label: str
    x: float | None = None
    y: float | None = None


Mark = Line | Grey | Points | Rule


@dataclass(frozen=True)
class Axis:
    """low, high: what it must reach. categories: names of 0, 1, …, the first at the top. never: the name of infinity,
    which has a lane at the far end: something did not happen."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    categories: tuple[str, ...] = ()
    never: str = ""


@dataclass(frozen=True)
class Panel:
    """A chart. id: a name for files and links. description: what somebody hears who does not see it. note: below it."""

    id: str
    title: str
    description: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    note: str = ""
    lanes: tuple[str, ...] = ()
    small: bool = False

    def scales(self) -> tuple[Scale, Scale]:
        return Scale.of(self.x, self._values("x")), Scale.of(self.y, self._values("y"))

    def _values(self, which: str) -> Iterable[float]:
        for mark in self.marks:
            if isinstance(mark, Rule):
                value = getattr(mark, which)
                yield from () if value is None else (value,)
                continue
            along = which == "x" and isinstance(mark, Points) and mark.across
            if which == "x":
                yield from mark.x
                yield from chain(mark.low, mark.high) if along else ()
            else:
                yield from () if isinstance(mark, Grey) else mark.y
                yield from () if isinstance(mark, Points) and mark.across else chain(mark.low, mark.high)


@dataclass(frozen=True)
class Scale:
    """Values to shares of an axis, 0 at its beginning and 1 at its end.

    A logarithmic one gives zero (and less) a lane of its own at the beginning, if any value is; `never` gives infinity
    one at the end.
    """

    axis: Axis
    low: float
    high: float
    zero: bool = False
    empty: bool = False  # logarithmic, with nothing but zero on it

    @classmethod
    def of(cls, axis: Axis, values: Iterable[float]) -> Scale:
        known = [value for value in values if math.isfinite(value)]
        if axis.categories:
            return cls(axis, -0.5, len(axis.categories) - 0.5)
        if axis.log:
            positive = [value for value in known if value > 0]
            if not positive:
                return cls(axis, 0.0, 1.0, zero=True, empty=True)
            low, high = math.log10(min(positive)), math.log10(max(positive))
            low, high = (low - 0.5, high + 0.5) if high - low < 0.3 else (low - 0.05, high + 0.05)
            return cls(axis, low, high, any(value <= 0 for value in known))
        known += [value for value in (axis.low, axis.high) if value is not None]
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        pad = (high - low) * 0.04 or abs(low) * 0.1 or 1.0
        return cls(axis, low if low == axis.low else low - pad, high if high == axis.high else high + pad)

    def share(self, value: float) -> float:
        """NaN where there is no place for it."""
        begin = LANE if self.zero else 0.0
        end = 1.0 - LANE if self.axis.never else 1.0
        if math.isnan(value) or (math.isinf(value) and not self.axis.never):
            return math.nan
        if math.isinf(value):
            return 1.0 - LANE * 0.4
        if self.axis.categories:
            return 1.0 - (value - self.low) / (self.high - self.low)
        if self.axis.log:
            if value <= 0:
                return LANE * 0.4
            value = math.log10(value)
        return begin + (value - self.low) / (self.high - self.low) * (end - begin)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """(share, name), from the beginning to the end."""
        if self.axis.categories:
            return [(self.share(i), name) for i, name in enumerate(self.axis.categories)]
        if self.empty:
            return [(self.share(0.0), "0")]
        values = _decades(self.low, self.high, most) if self.axis.log else _round(self.low, self.high, most)
        marks = [(self.share(value), _name(value, self.axis.log, values)) for value in values]
        if self.axis.never:
            marks = [mark for mark in marks if mark[0] < 1.0 - 1.4 * LANE]
        if self.zero:
            marks.insert(0, (self.share(0.0), "0"))
        if self.axis.never:
            marks.append((self.share(math.inf), self.axis.never))
        return marks

    def edges(self) -> list[float]:
        """Where a lane is parted from the rest."""
        return ([LANE * 0.8] if self.zero else []) + ([1.0 - LANE * 0.8] if self.axis.never else [])


def _round(low: float, high: float, most: int) -> list[float]:
    """At most that many multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * k for k in (1, 2, 5, 10) if power * k >= rough), power * 10)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    if last - first < 1:
        return [10.0**e * k for e in range(math.floor(low), math.ceil(high) + 1) for k in (1, 2, 5)
                if low <= math.log10(10.0**e * k) <= high][:most]  # fmt: skip
    every = max(1, math.ceil((last - first + 1) / most))
    return [10.0**e for e in range(first, last + 1, every)]


SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _name(value: float, log: bool, among: Sequence[float]) -> str:
    """As a power of ten where any on the axis is far from 1."""
    sizes = [abs(each) for each in among if each] or [1.0]
    far = max(sizes) >= 1e5 or (min(sizes) < 9e-3 if log else max(sizes) < 1e-3)
    if not value or not far:
        return f"{value:.6g}".replace("-", "−")
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    mantissa = value / 10.0**exponent
    power = f"10{str(exponent).translate(SUPERSCRIPT)}"
    return power if abs(mantissa - 1) < 1e-6 else f"{mantissa:.3g}·{power}".replace("-", "−")
