"""Tables of the service."""

from __future__ import annotations

from scripts.doc_tables.table import Table, across, down, of_part
from scripts.service import evaluation
from scripts.service.tables import TABLES as COLUMNS

TABLES = {
    "serve-load": Table(
        "serve-load", of_part("load", across(COLUMNS["load"][1:], lambda row: f"{row['share']:g} of what is served"))
    ),
    "serve-full-queue": Table("serve-load", of_part("full queue", down(COLUMNS["full queue"]))),
    "serve-cost": Table("serve-cost", of_part("cost", down(COLUMNS["cost"]))),
    "serve-vanish": Table("serve-vanish", of_part("vanish", across(COLUMNS["vanish"][1:], lambda row: row["how"]))),
    "serve-faults": Table("serve-faults", of_part("fault", down(COLUMNS["fault"]))),
    "evaluation": Table("evaluation", down(evaluation.COLUMNS)),
}
"""Name -> table."""
