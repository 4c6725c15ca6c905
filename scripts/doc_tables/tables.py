"""The tables of the docs that are drawn from docs/data."""

from __future__ import annotations

from scripts.doc_tables import engine, faults, formats, papers, peers, service

TABLES = {
    **papers.TABLES,
    **engine.TABLES,
    **service.TABLES,
    **formats.TABLES,
    **faults.TABLES,
    **peers.TABLES,
}
"""Name -> table."""
