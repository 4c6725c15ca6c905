"""The files that a checkout has beside its packages, and a wheel in its own folder (setup.py puts them there)."""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
BUNDLED = PACKAGE / "bundled"
"""In an installed wheel. A checkout has no such folder."""
COMMIT = "COMMIT"
GIT_S = 5.0


def bundled_root() -> Path:
    """The folder that has requirements.lock, models and so on."""
    return BUNDLED if BUNDLED.is_dir() else CHECKOUT


def commit() -> str | None:
    """The commit that this code is of, with `-dirty` where files differ from it. None: nobody knows."""
    try:
        if BUNDLED.is_dir():
            return (BUNDLED / COMMIT).read_text().strip() or None
        command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True)
        return done.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
