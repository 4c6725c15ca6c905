"""Tables of what od-moe does on the paper's testbed: Table 2, drafts, emulated against simulated."""

from __future__ import annotations

from functools import partial

from scripts.doc_tables.table import Rows, Table, down, pivot
from scripts.lib.tables import Column, markdown_down
from scripts.measure import drafts
from scripts.measure.agreement import __main__ as agreement
from scripts.papers import quality_systems, table2_show


def _drafts(rows: Rows) -> str:
    """Of each case, medians of its turns."""
    return markdown_down(drafts.COLUMNS, drafts.summary(rows))


TABLE2 = {
    "emulated": "",
    "native": "Table 2 at this machine's own speed",
    "memory": "Table 2: device memory, MB",
    "quality": "Table 2: quality of answers",
}
"""Part -> title."""

TABLES = {
    "agreement": Table(
        "agreement-embedded-late agreement-embedded agreement-local",
        down(agreement.COLUMNS),
        "Emulated over simulated time, the paper's testbed",
    ),
    "agreement-drafts": Table(
        "agreement-embedded-drafts", down(agreement.DRAFTED), "Emulated over simulated time, with drafts"
    ),
    **{
        f"table2-{part}": Table("table2", partial(table2_show.of_docs, part=part), title)
        for part, title in TABLE2.items()
    },
    "quality_systems": Table("quality_systems", down(quality_systems.COLUMNS), "Answers by alpha and by smaller form"),
    "drafts": Table("drafts", _drafts),
    "drafts-runs": Table(
        "drafts drafts-run2 drafts-run3",
        pivot(Column("tokens/s", "case"), Column("run", "file"), Column("tokens/s", "tokens_per_s", ".2f")),
        "Drafts in three runs",
    ),
    "drafts-auto": Table(
        "drafts-auto",
        pivot(
            Column("tokens/s", "case"),
            Column("prompt", lambda row: f"prompt {row['turn'] + 1}"),
            Column("tokens/s", "tokens_per_s", ".2f"),
        ),
    ),
}
"""Name -> table."""
