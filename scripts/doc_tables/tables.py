"""The tables of the docs that are drawn from docs/data."""

from __future__ import annotations

from scripts.doc_tables import engine, od_moe, papers, service

TABLES = {**papers.TABLES, **engine.TABLES, **od_moe.TABLES, **service.TABLES}
"""Name -> table."""
