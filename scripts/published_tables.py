"""The tables of the docs that are drawn from docs/data: of which file, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.lib.tables import Column, Row, markdown_across, markdown_down
from scripts.papers import ablation_systems, prediction_show
from scripts.papers.predictors import shift
from scripts.papers.prefill import figures as prefill
from scripts.papers.routing import __main__ as routing
from scripts.processes import resident
from scripts.service import evaluation
from scripts.service.tables import TABLES as SERVICE
from scripts.simulated import fits

ABLATIONS = tuple(f"ablation_{paper}" for paper in ablation_systems.SERIES)
MODELS = ("many-moe", "fine-moe", "demo-moe", "deep-moe")


@dataclass(frozen=True, slots=True)
class Table:
    data: str
    """A file of docs/data, without `.json`; several with a space between."""
    draw: Callable[[list[dict[str, Any]]], str]
    """Its rows -> the table in Markdown. Each row of several files has `file`, and `of`, its model."""

    @property
    def files(self) -> list[str]:
        return self.data.split()


def _of_part(part: str, draw: Callable[[list[dict[str, Any]]], str]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: draw([row for row in rows if row["part"] == part])


def _across(columns: Sequence[Column], head: Callable[[Row], str]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: markdown_across(columns, rows, [head(row) for row in rows])


def _down(columns: Sequence[Column]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: markdown_down(columns, rows)


def _whole_and_ends(rows: list[dict[str, Any]]) -> str:
    """Of each model all layers together, the first and the last."""
    shown = [
        row
        for row, after in zip(rows, [*rows[1:], {"layer": "all"}], strict=True)
        if row["layer"] in ("all", "0") or after["layer"] == "all"
    ]
    return markdown_down(routing.COLUMNS, shown)


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
    "prediction": Table(" ".join(f"prediction-{name}" for name in MODELS), prediction_show.table),
    "routing": Table("routing", _whole_and_ends),
    "resident": Table("resident", _down(resident.COLUMNS)),
    **{name: Table(name, _down(ablation_systems.COLUMNS[3:10])) for name in ABLATIONS},
    "evaluation": Table("evaluation", _down(evaluation.COLUMNS)),
}
"""Name -> table."""
