"""Side-by-side timing: the candidates take turns, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

MIN_ROUNDS = 5  # a median of fewer says nothing


def interleaved(candidates: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median wall-clock seconds of one call of each candidate, taken in turns for about `seconds` in all.

    Every candidate runs once untimed first. Raises ValueError if there is none.
    """
    if not candidates:
        raise ValueError("interleaved: no candidates to time")
    for call in candidates.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < MIN_ROUNDS or time.perf_counter() < end:
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def processor() -> str:
    """The processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, str | int]:
    """Where a measurement was made: processor, threads and versions, to be stored beside the numbers."""
    try:
        vexact = version("vexact")
    except PackageNotFoundError:
        vexact = "not installed"
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vexact": vexact,
    }
