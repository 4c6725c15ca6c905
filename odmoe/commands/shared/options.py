"""Options that several commands share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

option = partial(typer.Option, show_default=False)
"""An option whose help has its default, if it has one."""
switch = partial(typer.Option, metavar="")
"""An option without a value."""
Json = Annotated[bool, switch("--json", help="Print one JSON object")]
Quiet = Annotated[bool, switch("-q", "--quiet", help="Show no progress")]
ResultOnly = Annotated[bool, switch("-q", "--quiet", help="Print the result only")]
ErrorsOnly = Annotated[bool, switch("-q", "--quiet", help="Print errors only")]
Debug = Annotated[bool, switch("--debug", help="Show tracebacks")]
PanelQuiet = Annotated[bool, switch("-q", "--quiet", help="Show no progress", rich_help_panel="Output")]
PanelDebug = Annotated[bool, switch("--debug", help="Show tracebacks", rich_help_panel="Output")]
"""Both for commands whose help has headings."""
LibrariesDebug = Annotated[
    bool, switch("--debug", help="Show tracebacks and the libraries' messages", rich_help_panel="Output")
]
"""For commands that run a model or a cluster."""
Config = Annotated[
    str | None,
    option(
        "--config",
        help="YAML file of settings (default: ODMOE_CONFIG, or ~/.config/odmoe/config.yaml)",
        rich_help_panel="Cluster",
        metavar="PATH",
    ),
]
File = Annotated[Path, typer.Argument(help="Cluster file, such as cluster.yaml")]
"""Of the commands for the machines of a cluster."""
ConfigAsForGenerate = Annotated[
    str | None,
    option("--config", help="YAML file of settings, as for generate", rich_help_panel="Cluster", metavar="PATH"),
]
