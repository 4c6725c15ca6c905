"""Tables of this engine beside others."""

from __future__ import annotations

from scripts.doc_tables.table import Rows, Table, named, pivot
from scripts.lib.tables import Column, markdown_down
from scripts.peers import show
from scripts.peers.figures import CACHED, CAPPED, said

ROWS = named(
    show.COLUMNS,
    "memory",
    "engine",
    "tokens/s",
    "TTFT s",
    "peak GB",
    "read MB/token",
    "hit rate",
    "agreement",
    "decode over",
    "TTFT over",
)
RUNS = {"peers": "first run", "peers-again": "second run"}


def _ratios(rows: Rows) -> str:
    """Of each run those that the project is measured by."""
    found = [
        {"run": RUNS[row["file"]], "ratio": f"{row['engine']}, {key}", "value": said(value)}
        for row in rows
        if row["engine"] == CACHED or row["case"] == CAPPED
        for key, value in row.items()
        if key.startswith(("decode over ", "ttft over "))
    ]
    return pivot(Column("ratio", "ratio"), Column("run", "run"), Column("value", "value"))(found)


TABLES = {
    "peers": Table("peers", lambda rows: markdown_down(ROWS, show.ran(rows))),
    "peers-again": Table(" ".join(RUNS), _ratios),
}
"""Name -> table."""
