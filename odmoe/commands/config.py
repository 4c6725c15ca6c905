"""`odmoe config`: the effective settings."""

from __future__ import annotations

from typing import Any

from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Config
from odmoe.settings.settings import Settings
from odmoe.settings.sources import dump, merge_sources


@with_settings(Settings)
def config(flags: dict[str, Any], config: Config = None) -> None:
    """Show the effective settings and where each comes from.

    Flags override ODMOE_* variables, these the configuration file, and the file the defaults.
    """
    print(dump(merge_sources(flags, config)), end="")
