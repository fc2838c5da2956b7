"""Settings in YAML: a file of them, and their dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from vexact.errors import BadInput


def read_yaml(path: Path, fault: type[BadInput]) -> Any:
    """What a file holds, an empty mapping where that is nothing. Raises `fault` naming the file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise fault(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise fault(f"{path}: cannot be read ({error})") from None
    except (yaml.YAMLError, ValueError) as error:
        raise fault(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    return {} if content is None else content


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key, value. A mapping with nothing in it is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
