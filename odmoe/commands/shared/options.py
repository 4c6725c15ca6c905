"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object", metavar="")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress", metavar="")]
ResultOnly = Annotated[bool, typer.Option("-q", "--quiet", help="Print the result only", metavar="")]
ErrorsOnly = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only", metavar="")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks", metavar="")]
PanelQuiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Show no progress", rich_help_panel="Output", metavar="")
]
PanelDebug = Annotated[bool, typer.Option("--debug", help="Show tracebacks", rich_help_panel="Output", metavar="")]
"""Both for commands whose help has headings."""
LibrariesDebug = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks and the libraries' messages", rich_help_panel="Output", metavar=""),
]
"""For commands that run a model or a cluster."""
Config = Annotated[
    str | None,
    typer.Option(
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
    typer.Option("--config", help="YAML file of settings, as for generate", rich_help_panel="Cluster", metavar="PATH"),
]
