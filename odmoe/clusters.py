"""What the launching machine keeps of a cluster: its certificates, secrets and known hosts."""

from __future__ import annotations

import os
from pathlib import Path


def cluster_dir(name: str) -> Path:
    """`$XDG_CONFIG_HOME/odmoe/clusters/<name>`, `~/.config/...` where that is not set."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "odmoe" / "clusters" / name


def token_file(folder: Path) -> Path:
    """Of Ray's token, in a cluster's directory and in a host's directory of keys."""
    return folder / "ray_token"
