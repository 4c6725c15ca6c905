"""Figures as the experiments draw them: colours, panels, and the small print at the foot."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, AMBER, RED, DARK, PURPLE, PALE = "#3b6ea5", "#f0b429", "#d64545", "#222222", "#8d6bb3", "#9fb8cf"
DPI, FOOT_POINTS = 130, 5.5


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, list[Any]]:
    """A figure of so many inches for `Experiment.save`, and its panels."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=DPI, layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
    for panel in found:
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, found


def write_foot(figure: Figure, texts: list[str]) -> None:
    """Each text in small print at the figure's foot, wrapped; the panels move up for it."""
    width, height = figure.get_size_inches()
    across = int(width * 72 / (FOOT_POINTS * 0.52))
    lines = [line for text in texts for line in textwrap.wrap(text, across)]
    foot = (len(lines) * 1.25 + 1) * FOOT_POINTS / 72 / height
    figure.get_layout_engine().set(rect=(0, foot, 1, 1 - foot))  # type: ignore[union-attr,call-arg]
    figure.text(
        0.008,
        0.4 * FOOT_POINTS / 72 / height,
        "\n".join(lines),
        fontsize=FOOT_POINTS,
        color="#666666",
        linespacing=1.2,
        va="bottom",
    )
