"""`held.json`: which experts' bytes are in the folder of a store in parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.errors import CorruptStoreError
from scheduler.held import experts_of, ranges_of
from scheduler.types import ExpertId, HeldRange

if TYPE_CHECKING:  # it imports torch; the launching machine's commands do without
    from checkpoint.manifest import LayerSpec

HELD = "held.json"


def held_text(experts: Iterable[ExpertId]) -> str:
    """The file: {"experts": {layer: [[first, last], ...]}}, each range with both of its ends."""
    layers: dict[str, list[list[int]]] = {}
    for layer, first, last in ranges_of(experts):
        layers.setdefault(str(layer), []).append([first, last])
    return json.dumps({"experts": layers})


def listed_in(found: Any) -> frozenset[ExpertId]:
    """The experts that a file's content names. Raises ValueError, TypeError, KeyError, AttributeError."""
    return experts_of(_ranges(found))


def _ranges(found: Any) -> list[HeldRange]:
    listed = found["experts"]
    return [HeldRange(int(layer), first, last) for layer, some in listed.items() for first, last in some]


def read_held(folder: Path, layers: Mapping[int, LayerSpec]) -> frozenset[ExpertId] | None:
    """None where there is no such file: the folder holds all. Raises CorruptStoreError."""
    where = folder / HELD
    try:
        text = where.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"{where} cannot be read ({error}); copy the store to this host again") from error
    try:
        ranges = _ranges(json.loads(text))
        if any(type(number) is not int for one in ranges for number in one):
            raise TypeError("an end of a range is no integer")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptStoreError(f"{where} is damaged ({error}); copy the store to this host again") from error
    for layer, first, last in ranges:
        if layer not in layers or not 0 <= first <= last < len(layers[layer].blobs):
            raise CorruptStoreError(
                f"{where} names experts {first} to {last} of layer {layer}, which the store does not have; copy the "
                "store to this host again"
            )
    return experts_of(ranges)
