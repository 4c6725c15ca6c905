"""The folder of models that were copied or fetched to be used by their short name."""

from __future__ import annotations

import os
from pathlib import Path


def models_dir() -> Path:
    """`$XDG_DATA_HOME/odmoe/models`, or `~/.local/share/odmoe/models` where that is not set."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "odmoe" / "models"


def named_model(name: str) -> Path | None:
    """The model of that short name in the folder, if there is one."""
    if not name or Path(name).name != name:
        return None
    path = models_dir() / name
    return path if path.exists() else None
