"""Charts as SVG inside the page: its colours are the page's, so one drawing serves light, dark and paper."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from vexact.report.figure import SHAPES, SLOTS, Grey, Line, Panel, Points, Rule, Scale

ROW = 17  # of an axis of names
ZERO = "exactly zero throughout"
ADVANCE = 6.2  # of a letter, about; some browsers set them wide


@dataclass(frozen=True)
class Box:
    """Where the data are drawn: width, height of everything, and the plain margins."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def of(cls, panel: Panel) -> Box:
        if panel.small:
            return cls(172, 92, 26, 6, 6, 16)
        names = panel.y.categories
        left = min(190.0, 14 + max(len(name) for name in names) * ADVANCE) if names else 50.0
        return cls(360, 46 + len(names) * ROW if names else 226, left, 12, 8, 36)

    def x(self, share: float) -> float:
        return self.left + share * (self.width - self.left - self.right)

    def y(self, share: float) -> float:
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


def draw(panel: Panel, lit: Sequence[int], many: bool, nulls: Collection[int] = ()) -> Markup:
    """The panel. lit: the arms that begin coloured, each with the colour of its place. many: others are drawn grey.
    nulls: arms that the grey band stands for; their own lines are hidden until they are asked for."""
    box, (x, y) = Box.of(panel), panel.scales()
    slots = {arm: i % SLOTS for i, arm in enumerate(lit)}
    kind = "" if not many else " many" if any(isinstance(mark, Line) for mark in panel.marks) else " many dots"
    parts = [
        f'<svg class="chart{kind}" viewBox="0 0 {_n(box.width)} {_n(box.height)}" role="img" '
        f'aria-labelledby="{panel.id}-t {panel.id}-d" data-s="{_frame(box, x, y)}">',
        f'<title id="{panel.id}-t">{escape(panel.title)}</title>',
        f'<desc id="{panel.id}-d">{escape(panel.description)}</desc>',
        *_axes(panel, box, x, y),
    ]
    order = {Grey: 0, Rule: 1, Line: 2, Points: 3}
    for mark in sorted(panel.marks, key=lambda mark: (order[type(mark)], getattr(mark, "arm", -1) in slots)):
        if isinstance(mark, Grey):
            parts.append(f'<path class="null" d="{_area(mark.x, mark.low, mark.high, box, x, y)}"/>')
        elif isinstance(mark, Rule):
            parts.append(_rule(mark, box, x, y))
        else:
            place = slots.get(mark.arm)
            name = "none" if mark.arm < 0 else f"arm k{place}" if place is not None else "arm"
            name += " of-null" if mark.arm in nulls else ""
            body = _line(mark, place or 0, box, x, y) if isinstance(mark, Line) else _points(mark, box, x, y)
            on = " on" if place is not None else ""
            parts.append(f'<g class="{name}{on}" data-a="{mark.arm}">{body}</g>')
    return Markup("".join(parts) + "</svg>")


def _axes(panel: Panel, box: Box, x: Scale, y: Scale) -> Iterator[str]:
    left, right, bottom, top = box.x(0), box.x(1), box.y(0), box.y(1)
    ticks = y.ticks(2 if panel.small else 5)
    grid = "".join(f"M{_n(left)} {_n(box.y(share))}H{_n(right)}" for share, _ in ticks)
    lanes = "".join(f"M{_n(left)} {_n(box.y(share))}H{_n(right)}" for share in y.edges())
    lanes += "".join(f"M{_n(box.x(share))} {_n(top)}V{_n(bottom)}" for share in x.edges())
    yield f'<path class="grid" d="{grid}"/><path class="axis" d="M{_n(left)} {_n(bottom)}H{_n(right)}"/>'
    if y.empty:
        middle = _n((left + right) / 2), _n((top + bottom) / 2)
        yield f'<text class="lx" x="{middle[0]}" y="{middle[1]}">{ZERO}</text>'
    if lanes:
        yield f'<path class="lane" d="{lanes}"/>'
    for share, name in ticks:
        yield f'<text class="ty" x="{_n(left - 5)}" y="{_n(box.y(share) + 3.5)}">{escape(_cut(name, left))}</text>'
    for share, name in x.ticks(2 if panel.small else 5):
        edge = "end" if share > 0.97 else "middle"
        yield (
            f'<text class="tx" text-anchor="{edge}" x="{_n(box.x(share))}" y="{_n(bottom + 13)}">{escape(name)}</text>'
            f'<path class="axis" d="M{_n(box.x(share))} {_n(bottom)}v3"/>'
        )
    if not panel.small:
        yield f'<text class="lx" x="{_n((left + right) / 2)}" y="{_n(box.height - 6)}">{escape(panel.x.label)}</text>'


def _line(mark: Line, slot: int, box: Box, x: Scale, y: Scale) -> str:
    area = f'<path class="band" d="{_area(mark.x, mark.low, mark.high, box, x, y)}"/>' if mark.low else ""
    path, pen, last = [], "M", None
    for a, b in zip(mark.x, mark.y, strict=True):
        place = x.share(a), y.share(b)
        if math.isnan(place[0] + place[1]):
            pen, last = "M", None
            continue
        across, up = box.x(place[0]), box.y(place[1])
        if mark.stairs and last is not None:
            path.append(f"H{_n(across)}V{_n(up)}")
        else:
            path.append(f"{pen}{_n(across)} {_n(up)}")
        pen, last = "L", (across, up)
    end = f'<use class="end" href="#m{slot}" x="{_n(last[0])}" y="{_n(last[1])}"/>' if last and not mark.stairs else ""
    return f'<title>{escape(mark.label)}</title>{area}<path class="line" d="{"".join(path)}"/>{end}'


def _area(xs: Sequence[float], low: Sequence[float], high: Sequence[float], box: Box, x: Scale, y: Scale) -> str:
    rows = [(box.x(x.share(a)), box.y(y.share(b)), box.y(y.share(c))) for a, b, c in zip(xs, low, high, strict=True)]
    rows = [row for row in rows if not any(map(math.isnan, row))]
    if not rows:
        return ""
    there = "L".join(f"{_n(a)} {_n(c)}" for a, _, c in rows)
    return f"M{there}L{'L'.join(f'{_n(a)} {_n(b)}' for a, b, _ in reversed(rows))}Z"


def _points(mark: Points, box: Box, x: Scale, y: Scale) -> str:
    shape = f"m{SHAPES.index(mark.shape)}"
    parts = []
    for i, (a, b) in enumerate(zip(mark.x, mark.y, strict=True)):
        place = x.share(a), y.share(b)
        if math.isnan(place[0] + place[1]):
            continue
        across, up = box.x(place[0]), box.y(place[1])
        if mark.low:
            ends = [(x if mark.across else y).share(each[i]) for each in (mark.low, mark.high)]
            if not any(map(math.isnan, ends)):
                begin, end = ((box.x if mark.across else box.y)(each) for each in ends)
                bar = f"M{_n(begin)} {_n(up)}H{_n(end)}" if mark.across else f"M{_n(across)} {_n(begin)}V{_n(end)}"
                parts.append(f'<path class="bar" d="{bar}"/>')
        tip = f"<title>{escape(mark.tips[i] if mark.tips else mark.label)}</title>"
        kind = "dot hollow" if mark.hollow else "dot"
        parts.append(f'<g class="{kind}">{tip}<use href="#{shape}" x="{_n(across)}" y="{_n(up)}"/></g>')
    return "".join(parts)


def _rule(mark: Rule, box: Box, x: Scale, y: Scale) -> str:
    if mark.x is None and mark.y is None:
        low, high = max(x.low, y.low), min(x.high, y.high)
        ends = [(box.x(x.share(v)), box.y(y.share(v))) for v in (low, high)]
        path = f"M{_n(ends[0][0])} {_n(ends[0][1])}L{_n(ends[1][0])} {_n(ends[1][1])}"
    elif mark.x is not None:
        path = f"M{_n(box.x(x.share(mark.x)))} {_n(box.y(0))}V{_n(box.y(1))}"
    else:
        path = f"M{_n(box.x(0))} {_n(box.y(y.share(mark.y or 0.0)))}H{_n(box.x(1))}"
    return f'<path class="rule" d="{path}"><title>{escape(mark.label)}</title></path>'


def _frame(box: Box, x: Scale, y: Scale) -> str:
    """What the script needs to read a place back: edges of the frame, and of each axis its ends, kind and lane."""
    sides = [box.x(0), box.x(1), box.y(0), box.y(1)]
    axes = [(s.low, s.high, int(s.axis.log), int(s.zero)) for s in (x, y)]
    return " ".join(f"{value:.6g}" for value in [*sides, *axes[0], *axes[1]])


def legend(labels: Sequence[str], roles: Sequence[str], lit: Sequence[int], many: bool) -> Markup:
    """A button for each arm, which lights it in every chart; of many it says which are lit."""
    slots = {arm: i % SLOTS for i, arm in enumerate(lit)}
    parts = []
    for arm, (label, role) in enumerate(zip(labels, roles, strict=True)):
        place = slots.get(arm)
        kind = f"chip k{place} on" if place is not None else "chip of-null" if role == "null" else "chip"
        what = {"exact": " <small>exact</small>", "null": " <small>null</small>"}.get(role, "")
        pressed = str(many and place is not None).lower()
        parts.append(
            f'<button type="button" class="{kind}" data-a="{arm}" aria-pressed="{pressed}">'
            f'<svg viewBox="0 0 30 12" aria-hidden="true"><path class="line" d="M2 6H28"/>'
            f'<use class="end" href="#m{place or 0}" x="15" y="6"/></svg>{escape(label)}{what}</button>'
        )
    return Markup("".join(parts))


def _cut(name: str, room: float) -> str:
    """Its beginning and its end: what tells arms apart is often a number behind."""
    most = int((room - 8) / ADVANCE)
    if len(name) <= most:
        return name
    tail = min(10, most // 2)
    return f"{name[: max(1, most - 1 - tail)]}…{name[len(name) - tail :]}"


def _n(value: float) -> str:
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
