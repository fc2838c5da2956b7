"""`vexact info`."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Any

import torch

from vexact.commands.model import DTYPES
from vexact.loop.folder import versions
from vexact.model.digest import arithmetic_digest
from vexact_kernels import CONTRACT_VERSION, Kernels, available

if TYPE_CHECKING:
    from vexact.cli import Info


def run(args: Info, kernels: Kernels) -> int:
    facts = collect(kernels)
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    for key, value in facts.items():
        inside = [f"{name} {text}" for name, text in value.items()] if isinstance(value, dict) else value
        print(f"{key:18} {', '.join(inside) if isinstance(inside, list) else inside}")
    return 0


def collect(kernels: Kernels) -> dict[str, Any]:
    """What a report of a problem, or a run's record, should say about the machine."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernels": kernels.name,
        "device": str(kernels.device),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch sees",
        "instruction_sets": available(),
        "threads": torch.get_num_threads(),
        "contract": CONTRACT_VERSION,
        "profile": kernels.profile,
        "digests": {name: arithmetic_digest(kernels, dtype) for name, dtype in DTYPES.items()},
    }
