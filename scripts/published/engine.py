"""Tables of what the engine itself was measured to take."""

from __future__ import annotations

from scripts.processes import resident
from scripts.published.table import Table, down

TABLES = {
    "resident": Table("resident", down(resident.COLUMNS)),
}
"""Name -> table."""
