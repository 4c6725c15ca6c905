"""The tables of the docs that are drawn from docs/data."""

from __future__ import annotations

from scripts.doc_tables import costs, od_moe, papers, readme
from scripts.doc_tables.table import Table, down, named
from scripts.lib.tables import markdown_down
from scripts.measure.agreement import systems as agreement_systems
from scripts.peers import show
from scripts.testbed import kills

PEER_COLUMNS = named(
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

TABLES = {
    **papers.TABLES,
    **od_moe.TABLES,
    "agreement-systems": Table(
        "agreement-systems", down(agreement_systems.COLUMNS), "Emulated over simulated time, every system"
    ),
    **costs.TABLES,
    "peers": Table("peers", lambda rows: markdown_down(PEER_COLUMNS, show.ran(rows))),
    "kills": Table("kills", down(kills.COLUMNS)),
    **readme.TABLES,
}
"""Name -> table."""
