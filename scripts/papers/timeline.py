"""Pictures of what nodes do over time, in the manner of the OD-MoE paper's Figs 2, 4 and 5; for `pipeline.py`.

One row a node, time to the right. Red: the main node waits for a load. Yellow: the shadow waits for its alignment, the
late departure.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from scheduler.files import write_whole
from scheduler.trace import Span

LOOKS: dict[str, tuple[str, float, float, str]] = {
    # span: colour, height, place in its row, name in the legend
    "layer": ("#3b6ea5", 0.7, 0.0, "main: attention, gate"),
    "gate": ("#9fb8cf", 0.7, 0.0, "main: schedules, sends"),
    "head": ("#7fa7d1", 0.7, 0.0, "main: head, next token"),
    "wait": ("#dfe6ee", 0.7, 0.0, "main waits for experts"),
    "stall": ("#d64545", 0.26, 0.0, "main waits for a load: stall"),
    "shadow": ("#8d6bb3", 0.7, 0.0, "shadow: one layer"),
    "ahead": ("#e9e2f1", 0.26, 0.0, "shadow is ahead and waits"),
    "shadow's head": ("#b9a3d3", 0.7, 0.0, "shadow: head, next token"),
    "late": ("#f0b429", 0.26, 0.0, "late departure: waits for alignment"),
    "align": ("#b9770e", 0.7, 0.0, "shadow takes alignment over"),
    "load": ("#c9d3dd", 0.7, 0.0, "expert loads"),
    "given up": ("#efe3c8", 0.7, 0.0, "load given up"),
    "compute": ("#3f9b6c", 0.7, 0.0, "expert computes"),
    "transfer": ("#222222", 0.1, 0.42, "message travels"),
}
ROW_INCHES, WIDTH_INCHES, DPI = 0.42, 14.0, 120
EVICT = "#3f9b6c"


def rows_of(spans: list[Span]) -> list[str]:
    workers = sorted({s.row for s in spans if s.row.startswith("worker")}, key=lambda row: int(row.split()[1]))
    return [row for row in ("main", "shadow") if any(s.row == row for s in spans)] + workers


@dataclass(frozen=True, slots=True)
class Panel:
    """What happened from `start` to `end` seconds, one row a node."""

    spans: list[Span]
    start: float
    end: float
    title: str


def draw_panels(panels: Sequence[Panel], out: Path, note: str = "") -> None:
    """A picture of panels, one below the other."""
    rows = [len(rows_of(panel.spans)) for panel in panels]
    height = sum(1.0 + ROW_INCHES * count for count in rows) + 0.9
    figure, found = plt.subplots(
        len(panels), squeeze=False, figsize=(WIDTH_INCHES, height), dpi=DPI, gridspec_kw={"height_ratios": rows}
    )
    seen: set[str] = set()
    for panel, axes in zip(panels, found[:, 0], strict=True):
        seen |= _draw_panel(axes, panel)
    handles: list[Any] = [Patch(color=look[0], label=look[3]) for what, look in LOOKS.items() if what in seen]
    if any(span.what == "evict" for panel in panels for span in panel.spans):
        handles.append(Line2D([], [], color=EVICT, marker="^", markersize=4, linestyle="", label="expert is evicted"))
    below = -0.75 / (ROW_INCHES * rows[-1] + 0.4)
    found[-1, 0].legend(
        handles=handles, ncols=5, loc="upper left", bbox_to_anchor=(0, below), frameon=False, fontsize=8.5
    )
    if note:
        figure.text(0.995, 0.005, note, ha="right", va="bottom", fontsize=7, color="#666666")
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix.removeprefix(".") or "png")
    plt.close(figure)
    write_whole(out, picture.getvalue())


def _draw_panel(axes: Axes, panel: Panel) -> set[str]:
    """Returns the spans that can be seen."""
    rows, start, end = rows_of(panel.spans), panel.start, panel.end
    seen: set[str] = set()
    for span in split_waits(panel.spans):
        if span.end > start and span.start < end and span.row in rows:
            _bar(axes, span, rows.index(span.row), start, end - start)
            if span.end - span.start > (end - start) / 2000:
                seen.add(span.what)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_xlabel("milliseconds")
    axes.set_title(panel.title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for line in range(len(rows)):
        axes.axhline(line + 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    return seen


def split_waits(spans: list[Span]) -> list[Span]:
    """The shadow's waits for an alignment, cut where the token to be aligned with begins: only from there on is it
    late, before it is ahead."""
    starts = sorted(s.start for s in spans if s.what == "token")
    cut: list[Span] = []
    for span in spans:
        if span.row == "shadow" and span.what == "head":
            span = replace(span, what="shadow's head")
        at = max((start for start in starts if start <= span.end), default=span.start)
        if span.what != "late" or at <= span.start:
            cut.append(span)
        else:
            cut += [replace(span, what="ahead", end=at), replace(span, start=at)]
    return cut


def _bar(axes: Axes, span: Span, row: int, start: float, length: float) -> None:
    if span.what == "evict":
        axes.plot([(span.start - start) * 1e3], [row + 0.3], marker="^", color=EVICT, markersize=3, zorder=5)
        return
    if span.what not in LOOKS:
        return
    colour, height, place, _ = LOOKS[span.what]
    left, width = (span.start - start) * 1e3, (span.end - span.start) * 1e3
    over = 3 if span.what in ("stall", "late", "ahead", "transfer") else 2
    axes.barh(row + place, width, left=left, height=height, color=colour, edgecolor="white", lw=0.3, zorder=over)
    shown = min(left + width, length * 1e3) - max(left, 0)
    text = f"{span.label.split('.')[0]}.{span.label.split('.')[1]}" if span.label.count(".") >= 1 else span.label
    if span.what in ("load", "compute", "shadow", "layer") and shown > length * 1e3 * 0.011 * max(2, len(text)) / 2.4:
        shade = "#222222" if span.what == "load" else "white"
        at = max(left, 0) + shown / 2
        axes.text(at, row, text, ha="center", va="center", fontsize=6, color=shade, clip_on=True, zorder=4)
