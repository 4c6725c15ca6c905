"""The settings with which `odmoe simulate` compares systems over several memories, loads, hosts and batches."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from odmoe.settings.simulate_settings import MAX_REQUESTS
from odmoe.settings.table import Count, Number, Table, setting
from odmoe.settings.units import Memory


def _split(value: Any) -> Any:
    """`10%,25%` and several flags are the same."""
    given = value if isinstance(value, list | tuple) else [value]
    return [part.strip() if isinstance(part, str) else part for one in given for part in _parts(one)]


def _parts(value: Any) -> list[Any]:
    return value.split(",") if isinstance(value, str) else [value]


_Several = BeforeValidator(_split)
_Positive = Annotated[Number, Field(gt=0)]


class SweepSettings(Table):
    """Several values of each, with commas between them. Raises ConfigError."""

    compare: Annotated[tuple[str, ...], _Several] = setting(
        (),
        "systems or residencies",
        "Presets, residencies, perfect or perfect-host: lru,importance+alpha=0",
        heading="Sweep",
    )
    device_memory: Annotated[tuple[Memory, ...], _Several] = setting(
        (), "shares of all experts such as 10%,25%", "Shares of all experts that have slots: 10%,25%", heading="Sweep"
    )
    load_ms: Annotated[tuple[_Positive, ...], _Several] = setting(
        (), "milliseconds above 0", "Times of a load, in place of the profile's", heading="Sweep"
    )
    host_ms: Annotated[tuple[_Positive, ...], _Several] = setting(
        (), "milliseconds above 0", "Times of an expert on the host, likewise", heading="Sweep"
    )
    batch: Annotated[tuple[Annotated[Count, Field(ge=1, le=MAX_REQUESTS)], ...], _Several] = setting(
        (), f"1 to {MAX_REQUESTS}", "Requests answered at once", heading="Sweep"
    )
    map: bool = setting(
        False, "true, false", "Vary load, host, memory and batch: who wins, by how much", heading="Sweep"
    )
    output: str | None = setting(
        None, "a file", "Write the points to FILE.json or FILE.csv", "-o", heading="Sweep", output_file=True
    )
