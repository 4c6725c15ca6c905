"""Tables of formats of experts."""

from __future__ import annotations

from scripts.doc_tables.table import Rows, Table, named, pivot, with_key
from scripts.lib.tables import Column, markdown_down
from scripts.measure.formats import lossless

WEIGHT = Column("weight", "weight")
OF_NORMAL = named(lossless.COLUMNS, *(column.name for column in lossless.COLUMNS if column.name != "weights"))


def _of_normal(rows: Rows) -> str:
    """Of random normal weights only."""
    return markdown_down(OF_NORMAL, [row for row in rows if row["weights"] == lossless.NORMAL])


TABLES = {
    "restoring": Table(
        "restoring",
        with_key("gb_per_s", pivot(Column("method, GB/s", "method"), WEIGHT, Column("GB/s", "gb_per_s", ".2f"))),
    ),
    "restoring-products": Table(
        "restoring", with_key("ms", pivot(Column("one row, ms", "method"), WEIGHT, Column("ms", "ms", ".2f")))
    ),
    "lossless": Table("lossless", _of_normal),
    "lossless-weights": Table(
        "lossless",
        pivot(Column("bytes over bf16", "coder"), Column("weights", "weights"), Column("ratio", "ratio", ".3f")),
    ),
}
"""Name -> table."""
