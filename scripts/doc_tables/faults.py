"""Tables of what happens when nodes are lost."""

from __future__ import annotations

from scripts.doc_tables.table import Table, down
from scripts.testbed import kills

TABLES = {"kills": Table("kills", down(kills.COLUMNS))}
"""Name -> table."""
