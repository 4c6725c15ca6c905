"""The tables of the docs that are drawn from docs/data: of which file, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.lib.tables import Column, Row, markdown_across, markdown_down
from scripts.papers.predictors import shift
from scripts.papers.prefill import figures as prefill
from scripts.service import evaluation
from scripts.service.tables import TABLES as SERVICE
from scripts.simulated import fits


@dataclass(frozen=True, slots=True)
class Table:
    data: str
    """A file of docs/data, without `.json`."""
    draw: Callable[[list[dict[str, Any]]], str]
    """Its rows -> the table in Markdown."""


def _of_part(part: str, draw: Callable[[list[dict[str, Any]]], str]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: draw([row for row in rows if row["part"] == part])


def _across(columns: Sequence[Column], head: Callable[[Row], str]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: markdown_across(columns, rows, [head(row) for row in rows])


def _down(columns: Sequence[Column]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: markdown_down(columns, rows)


TABLES = {
    "serve-load": Table(
        "serve-load", _of_part("load", _across(SERVICE["load"][1:], lambda row: f"{row['share']:g} of what is served"))
    ),
    "serve-full-queue": Table("serve-load", _of_part("full queue", _down(SERVICE["full queue"]))),
    "serve-cost": Table("serve-cost", _of_part("cost", _down(SERVICE["cost"]))),
    "serve-vanish": Table("serve-vanish", _of_part("vanish", _across(SERVICE["vanish"][1:], lambda row: row["how"]))),
    "serve-faults": Table("serve-faults", _of_part("fault", _down(SERVICE["fault"]))),
    "fits": Table(
        "fits",
        _across(fits.COLUMNS[2:], lambda row: f"{1e3 * row['load_s']:g} and {1e3 * row['shadow_layer_s']:g} ms"),
    ),
    "prefill": Table("prefill-simulated", prefill.wide),
    "prefill-row-by-row": Table("prefill-row-by-row", prefill.wide),
    "shift": Table("shift", _down(shift.COLUMNS)),
    "evaluation": Table("evaluation", _down(evaluation.COLUMNS)),
}
"""Name -> table."""
