"""Tables of this engine beside others."""

from __future__ import annotations

from scripts.doc_tables.table import Table, named
from scripts.lib.tables import markdown_down
from scripts.peers import show

COLUMNS = named(
    show.COLUMNS,
    "memory",
    "engine",
    "tokens/s",
    "TTFT s",
    "peak GB",
    "read MB/token",
    "hit rate",
    "agreement",
    "decode over",
    "TTFT over",
)

TABLES = {"peers": Table("peers", lambda rows: markdown_down(COLUMNS, show.ran(rows)))}
"""Name -> table."""
