"""The models that come with OD-MoE, in an installed package or in a checkout."""

from __future__ import annotations

from pathlib import Path

DEMO = "chat-moe"
"""The model that `odmoe pull demo` gives."""
_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE / "bundled" / "models", _HERE.parent / "models")
"""In a wheel; in a checkout."""


def demo_source() -> Path | None:
    """The folder of the demo model; None where the installation has none."""
    return shipped_models().get(DEMO)


def shipped_models() -> dict[str, Path]:
    """Name -> folder of each model that came with this installation."""
    found: dict[str, Path] = {}
    for place in _PLACES:
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            if (folder / "config.json").is_file():
                found.setdefault(folder.name, folder)
    return found
