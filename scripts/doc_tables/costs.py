"""Tables of what parts of the engine cost: smaller forms, starts, steps, several requests."""

from __future__ import annotations

from scripts.doc_tables.table import Draw, Table, across, down, of_part
from scripts.lib.tables import Row, markdown_down
from scripts.measure import forms, requests, step

ALONE = ("step-fully-cached-embedded-none", "step-on-demand-embedded-none")
TRACED = ("step-od-moe-embedded-none", "step-od-moe-embedded-nf4", "step-od-moe-local-nf4")


def _place(row: Row) -> str:
    return f"{row['cluster']}, " + ("no shadow" if row["shadow"] == "none" else row["shadow"])


def _forms(part: str, columns: forms.Columns) -> Draw:
    return of_part(part, lambda rows: markdown_down(columns(rows), rows))


TABLES = {
    "forms": Table("forms", _forms("uniform", forms.uniform_columns), "Experts in fewer bits"),
    "forms-search": Table("forms", _forms("search", forms.search_columns), "Experts in int2, by popularity"),
    "step-alone": Table(" ".join(ALONE), down(step.COLUMNS), "A small model beside Transformers"),
    "step-path": Table(" ".join(TRACED), across(step.PATH, _place), "Where a decode step goes, ms of all layers"),
    "requests": Table("requests", down(requests.COLUMNS)),
}
"""Name -> table."""
