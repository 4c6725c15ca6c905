"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object", metavar="")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress", metavar="")]
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
