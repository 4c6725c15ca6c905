"""Tables of what the engine itself was measured to take."""

from __future__ import annotations

from scripts.measure.agreement import systems as agreement_systems
from scripts.processes import resident
from scripts.published.table import Table, down

TABLES = {
    "agreement-systems": Table("agreement-systems", down(agreement_systems.COLUMNS)),
    "resident": Table("resident", down(resident.COLUMNS)),
}
"""Name -> table."""
