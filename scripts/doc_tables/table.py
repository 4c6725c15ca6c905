"""A table of the docs that is drawn from docs/data: of which file, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.lib.tables import Column, Row, markdown_across, markdown_down, markdown_pivot

Rows = list[dict[str, Any]]
Draw = Callable[[Rows], str]
"""Rows of data -> the table in Markdown."""


@dataclass(frozen=True, slots=True)
class Table:
    data: str
    """A file of docs/data, without `.json`; several with a space between."""
    draw: Draw
    """Each row of several files has `file`, and `of`, its model."""
    title: str = ""
    """Of its section in docs/data/README.md, if no other page shows the table."""

    @property
    def files(self) -> list[str]:
        return self.data.split()


def named(columns: Sequence[Column], *names: str) -> list[Column]:
    """Those of these names, in this order."""
    by_name = {column.name: column for column in reversed(columns)}
    return [by_name[name] for name in names]


def of_part(part: str, draw: Draw) -> Draw:
    """Only rows of that `part`."""
    return lambda rows: draw([row for row in rows if row["part"] == part])


def across(columns: Sequence[Column], head: Callable[[Row], str]) -> Draw:
    """A column of data is a line."""
    return lambda rows: markdown_across(columns, rows, [head(row) for row in rows])


def down(columns: Sequence[Column]) -> Draw:
    """A column of data is a column."""
    return lambda rows: markdown_down(columns, rows)


def pivot(line: Column, head: Column, cell: Column) -> Draw:
    return lambda rows: markdown_pivot(rows, line, head, cell)
