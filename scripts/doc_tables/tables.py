"""The tables of the docs that are drawn from docs/data."""

from __future__ import annotations

from scripts.doc_tables import costs, engine, faults, od_moe, papers, peers, readme

TABLES = {
    **papers.TABLES,
    **od_moe.TABLES,
    **engine.TABLES,
    **costs.TABLES,
    **peers.TABLES,
    **faults.TABLES,
    **readme.TABLES,
}
"""Name -> table."""
