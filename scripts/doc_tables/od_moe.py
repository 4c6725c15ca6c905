"""Tables of what od-moe does on the paper's testbed: Table 2, requests at once, drafts, emulated against simulated."""

from __future__ import annotations

from functools import partial

from scripts.doc_tables.table import Rows, Table, down, named, pivot
from scripts.lib.tables import Column, Row, markdown_down
from scripts.measure import drafts
from scripts.measure.agreement import __main__ as agreement
from scripts.papers import quality_systems, sweep_draft, sweep_requests, table2_show


def _drafts(rows: Rows) -> str:
    """Of each case, medians of its turns."""
    return markdown_down(drafts.COLUMNS, drafts.summary(rows))


def _way(row: Row) -> str:
    dense = "`--batch-dense`" if row["way"] == "batched" else "a forward each"
    return f"{dense}, {row['slots']} slot{'s' * (row['slots'] > 1)}"


TABLES = {
    "agreement": Table("agreement-embedded-late agreement-embedded agreement-local", down(agreement.COLUMNS)),
    "agreement-drafts": Table("agreement-embedded-drafts", down(agreement.DRAFTED)),
    **{
        f"table2-{part}": Table("table2", partial(table2_show.of_docs, part=part))
        for part in ("emulated", "native", "memory", "quality")
    },
    "quality_systems": Table("quality_systems", down(quality_systems.COLUMNS)),
    "sweep_requests": Table(
        "sweep_requests", pivot(Column("tokens/s of all", _way), *named(sweep_requests.COLUMNS, "requests", "tokens/s"))
    ),
    "drafts": Table("drafts", _drafts),
    "drafts-runs": Table(
        "drafts drafts-run2 drafts-run3",
        pivot(Column("tokens/s", "case"), Column("run", "file"), Column("tokens/s", "tokens_per_s", ".2f")),
    ),
    "drafts-auto": Table(
        "drafts-auto",
        pivot(
            Column("tokens/s", "case"),
            Column("prompt", lambda row: f"prompt {row['turn'] + 1}"),
            Column("tokens/s", "tokens_per_s", ".2f"),
        ),
    ),
    "sweep_draft": Table(
        "sweep_draft-acceptance",
        pivot(
            Column("drafts that are right, requests", lambda row: f"{row['acceptance']:.0%}, {row['requests']}"),
            *named(sweep_draft.OVER_REQUESTS, "drafts", "tokens/s"),
        ),
    ),
}
"""Name -> table."""
