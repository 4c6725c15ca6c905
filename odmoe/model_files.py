"""The models that come with OD-MoE, in an installed package or in a checkout."""

from __future__ import annotations

from pathlib import Path

from odmoe.bundled import bundled_root

DEMO = "chat-moe"
"""The model that `odmoe pull demo` gives."""


def shipped_models() -> dict[str, Path]:
    """Name -> folder of each model that came with this installation."""
    place = bundled_root() / "models"
    folders = sorted(place.iterdir()) if place.is_dir() else []
    return {folder.name: folder for folder in folders if (folder / "config.json").is_file()}
