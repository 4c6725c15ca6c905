"""Bits of experts whose layers are quantised differently, as GPTQModel's setting `dynamic` says. Without torch.

Its keys are regular expressions of modules' names, of which the first that matches holds: `-:` leaves a module as it
is, and others, with `+:` or without, change settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_PROJECTIONS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
"""What published models name them."""

Bits = Callable[[dict[str, Any]], float]
"""Of a value of an expert, by the settings; 0 where it is stored dequantised."""


def dynamic_bits(settings: dict[str, Any], layers: Iterable[Iterable[str]], bits_of: Bits, plain: float) -> float:
    """Of the layer with the most; 0 where all experts are stored dequantised: where gate and up differ, which are one
    parameter, where a layer is quantised in part, and where none is.

    `layers`: of each, the names that its experts may have. `plain`: bits of a value that is not quantised. The first
    expert stands for its layer.
    """
    dynamic = settings.get("dynamic")
    if not isinstance(dynamic, dict) or not dynamic:
        return bits_of(settings)
    found: list[float] = []
    quantised = False
    for experts in map(list, layers):
        gate, up, down = (
            _changes(dynamic, [f"{name}.0.{one}" for name in experts for one in ones]) for ones in _PROJECTIONS
        )
        if gate is up is down is None:
            found.append(plain)
            continue
        if gate != up or gate is None or down is None:
            return 0.0
        of_gate, of_down = bits_of(settings | gate), bits_of(settings | down)
        if not of_gate or not of_down:
            return 0.0
        found.append((2 * of_gate + of_down) / 3)
        quantised = True
    return max(found) if quantised else 0.0


def _changes(dynamic: Mapping[str, Any], names: list[str]) -> dict[str, Any] | None:
    """The settings that these modules have of their own; None where they are not quantised."""
    for pattern, changes in dynamic.items():
        if any(_matches(pattern.removeprefix("-:").removeprefix("+:"), name) for name in names):
            return None if pattern.startswith("-:") else changes if isinstance(changes, dict) else {}
    return {}


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False
