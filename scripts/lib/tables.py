"""Tables as data: a column says which figure of a row it shows, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    value: str | Callable[[Any], Any]
    """A key of the row, or a function of the row. None is shown as "-"."""
    form: str = ""
    """A format specification. Text without one stands to the left, all else to the right."""
    scale: float | None = None
    """What a number is multiplied by first."""

    def text(self, row: Row) -> str:
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if found is None:
            return "-"
        return format(found if self.scale is None else found * self.scale, self.form)


def text_table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Plain text, aligned, with the columns' names above."""
    lines = [[column.name for column in columns], *([column.text(row) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    sides = [">" if column.form else "<" for column in columns]
    return "\n".join(
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    head, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))


def markdown_down(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """A column of data is a column here."""
    return markdown([[one.name for one in columns], *([one.text(row) for one in columns] for row in rows)])


def markdown_across(columns: Sequence[Column], rows: Sequence[Row], heads: Sequence[str]) -> str:
    """A column of data is a line here, and a row a column under its head."""
    return markdown([["", *heads], *([one.name, *(one.text(row) for row in rows)] for one in columns)])


def markdown_pivot(rows: Sequence[Row], line: Column, head: Column, cell: Column) -> str:
    """A line for each value of `line`, a column for each of `head`, and `cell` of the row that has both; in the rows'
    order. "-" if there is none."""
    found = {(line.text(row), head.text(row)): cell.text(row) for row in rows}
    lines, heads = (list(dict.fromkeys(key[n] for key in found)) for n in (0, 1))
    return markdown([[line.name, *heads], *([one, *(found.get((one, h), "-") for h in heads)] for one in lines)])
