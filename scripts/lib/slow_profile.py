"""A profile whose every time is several times as long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from scheduler.timing import profile


def slowed(name: str, factor: float, folder: Path) -> Path:
    """A file with the shipped profile `name`, `factor` times as slow: a machine with few cores then keeps its times in
    an emulated run, whose figures are to be divided by the factor."""
    fields = yaml.safe_load((Path(profile.__file__).parent / "profiles" / f"{name}.yaml").read_text())
    path = folder / f"{name}-{factor:g}.yaml"
    path.write_text(yaml.safe_dump(_slowed(fields, factor) | {"name": f"{name}, {factor:g} times as slow"}))
    return path


def _slowed(fields: dict[str, Any], factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            found[key] = _slowed(value, factor)
        elif "_ms" in key:
            found[key] = value * factor
        elif key.endswith("_per_s"):
            found[key] = value / factor
        else:
            found[key] = value
    return found
