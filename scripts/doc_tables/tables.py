"""The tables of the docs that are drawn from docs/data."""

from __future__ import annotations

from scripts.doc_tables import costs, engine, papers, service

TABLES = {**papers.TABLES, **engine.TABLES, **costs.TABLES, **service.TABLES}
"""Name -> table."""
