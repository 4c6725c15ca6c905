"""Tables as data."""

from __future__ import annotations

from scripts.lib.tables import Column, markdown_across, text_table

COLUMNS = (
    Column("system", "name"),
    Column("ms", "seconds", ".1f", 1e3),
    Column("share", lambda row: row["part"] / row["whole"], ".0%"),
)
ROWS = [{"name": "smoe", "seconds": 0.0123, "part": 1, "whole": 4}, {"name": "on-demand", "part": 3, "whole": 3}]


def test_text_stands_left_and_numbers_right() -> None:
    assert text_table(COLUMNS, ROWS).split("\n") == [
        "system       ms  share",
        "smoe       12.3    25%",
        "on-demand     -   100%",
    ]


def test_rows_become_columns() -> None:
    assert markdown_across(COLUMNS[1:], ROWS, ["a", "b"]).split("\n") == [
        "|  | a | b |",
        "| --- | --- | --- |",
        "| ms | 12.3 | - |",
        "| share | 25% | 100% |",
    ]
