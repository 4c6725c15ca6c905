"""The tables of the docs that are drawn from docs/data."""

from __future__ import annotations

from scripts.doc_tables import costs, od_moe, papers, peers, readme
from scripts.doc_tables.table import Table, down
from scripts.measure.agreement import systems as agreement_systems
from scripts.testbed import kills

TABLES = {
    **papers.TABLES,
    **od_moe.TABLES,
    "agreement-systems": Table(
        "agreement-systems", down(agreement_systems.COLUMNS), "Emulated over simulated time, every system"
    ),
    **costs.TABLES,
    **peers.TABLES,
    "kills": Table("kills", down(kills.COLUMNS)),
    **readme.TABLES,
}
"""Name -> table."""
