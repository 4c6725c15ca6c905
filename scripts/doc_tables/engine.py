"""Tables of what the engine itself was measured to take."""

from __future__ import annotations

from scripts.doc_tables.table import Table, down
from scripts.measure.agreement import systems as agreement_systems
from scripts.processes import resident

TABLES = {
    "agreement-systems": Table(
        "agreement-systems", down(agreement_systems.COLUMNS), "Emulated over simulated time, every system"
    ),
    "resident": Table("resident", down(resident.COLUMNS), "`--memory` beside the memory that the process holds"),
}
"""Name -> table."""
