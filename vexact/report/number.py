"""Numbers as a reader sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

NOTHING = "–"
PLAIN = (1e-3, 1e5)  # sizes that are written without an exponent


def written(value: object, digits: int = 3) -> str:
    """A number in so many significant digits; None and NaN as a dash, infinity as `never` is for steps: ∞."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e5:
        value = int(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f") if abs(value) >= 10_000 else str(value)
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if PLAIN[0] <= abs(value) < PLAIN[1]:
        text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def pairs(numbers: object, prefix: str = "") -> list[tuple[str, str]]:
    """(name, number) of what a claim was decided by, however it is nested; numbers that belong together on one line."""
    if isinstance(numbers, Mapping):
        if prefix and numbers and all(_plain(value) for value in numbers.values()):
            return [(prefix, ", ".join(f"{name} {written(value)}" for name, value in numbers.items()))]
        return [pair for name, value in numbers.items() for pair in pairs(value, f"{prefix} {name}".strip())]
    if isinstance(numbers, Sequence) and not isinstance(numbers, str):
        if all(_plain(value) for value in numbers):
            return [(prefix, ", ".join(written(value) for value in numbers) or NOTHING)]
        return [pair for i, value in enumerate(numbers, 1) for pair in pairs(value, f"{prefix} {i}".strip())]
    return [(prefix, written(numbers))]


def _plain(value: object) -> bool:
    return not isinstance(value, Mapping | list | tuple)
