"""What is checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from odmoe.clusters.host_place import check_host_place
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.timing.profile import find_profile


def check_start(settings: Settings, named: Callable[[str], str], ends: str) -> None:
    """That there is a model to start, or a cluster to join, and retries only if a main node can come back.

    `named`: gives the name of a setting in messages. `ends`: what the nodes end with, a command or a process. Raises
    ConfigError.
    """
    cluster = f"{named('cluster')} {settings.cluster}"
    if not settings.model and not settings.uses_existing_ray:
        raise ConfigError(
            f"{named('model')} is not given, and {cluster} needs one; give a model directory, such as models/demo-moe"
        )
    if settings.retry and not settings.uses_existing_ray:
        raise ConfigError(
            f"{named('retry')} is {settings.retry} with {cluster}, whose main node ends with this {ends}; allowed: a "
            "cluster that lasts, such as auto or host:port"
        )


def check_early(settings: Settings) -> None:
    """What would otherwise be found out at the end. Raises ConfigError."""
    check_host_place(settings, None if settings.profile is None else find_profile(settings.profile))
    for name, file in (("--trace", settings.trace), ("--record", settings.record)):
        if file is not None:
            check_writable(name, file)
    files = {Path(file).resolve() for file in (settings.trace, settings.record) if file is not None}
    if settings.trace is not None and settings.record is not None and len(files) == 1:
        raise ConfigError(f"--trace and --record are both {settings.record!r}; give each a file of its own")


def check_writable(name: str, file: str) -> None:
    """Raises ConfigError if nothing can be written there. `name`: the flag that says so."""
    path = Path(file)  # written whole and then renamed, which would put a file in a device's place
    other = path.exists() and not path.is_file()
    if other or not file or not os.access(path.resolve().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} is {file!r}; allowed: a file in a directory that can be written to")
