"""Tables as data."""

from __future__ import annotations

from scripts.lib.tables import Column, markdown_across, markdown_pivot, text_table

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


def test_rows_are_spread_over_lines_and_columns() -> None:
    rows = [
        {"system": "smoe", "budget": 10, "hits": 0.25},
        {"system": "smoe", "budget": 25, "hits": 0.5},
        {"system": "fate", "budget": 25, "hits": 1.0},
    ]
    columns = Column("system", "system"), Column("", lambda row: f"{row['budget']} %"), Column("hits", "hits", ".0%")
    assert markdown_pivot(rows, *columns).split("\n") == [
        "| system | 10 % | 25 % |",
        "| --- | --- | --- |",
        "| smoe | 25% | 50% |",
        "| fate | - | 100% |",
    ]
