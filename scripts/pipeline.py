"""Draws docs/pipeline.png: one token through ten nodes, in the manner of the OD-MoE paper's Figs 2 and 5.

Simulated, not measured: the scheduler's own core on the paper's timings (profiles/rtx3090-1gbe.yaml).

    .venv/bin/python scripts/pipeline.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from scheduler.alignment import Alignment
from scheduler.profile import load_profile
from scheduler.simulator import Simulator, Span, predictor, random_routes

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {
    "main": "#3b6ea5", "stall": "#d64545", "shadow": "#8d6bb3", "align": "#e0a526", "load": "#c9d3dd",
    "given up": "#efe3c8", "compute": "#3f9b6c",
}  # fmt: skip
NAMES = {
    "main": "main: attention, gate", "stall": "main waits for a load", "shadow": "shadow: one layer",
    "align": "alignment travels", "load": "expert loads", "compute": "expert computes, then is evicted",
}  # fmt: skip
ROWS = ["main", "shadow", *[f"worker {n}" for n in range(1, 9)]]


def draw(spans: list[Span], start: float, end: float, title: str, out: Path) -> None:
    """One row a node, milliseconds from the token's start."""
    figure, axes = plt.subplots(figsize=(13, 5.2), dpi=130)
    for span in spans:
        if span.end > start and span.start < end and span.row in ROWS:
            bar(axes, span, start)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.invert_yaxis()
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_xlabel("milliseconds since the main node began this token")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for line in (1.5, 3.5, 5.5, 7.5):
        axes.axhline(line, color="#bbbbbb", linewidth=0.7, linestyle=":")
    handles = [Patch(color=COLOURS[what], label=name) for what, name in NAMES.items()]
    axes.legend(handles=handles, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(out)


def bar(axes: Axes, span: Span, start: float) -> None:
    left, width = (span.start - start) * 1e3, (span.end - span.start) * 1e3
    row = ROWS.index(span.row)
    thin = span.what in ("stall", "align")
    axes.barh(row, width, left=left, height=0.28 if thin else 0.7, color=COLOURS[span.what], edgecolor="white", lw=0.6)
    if span.what == "load" and width > 8:
        layer, expert = span.label.split(".")
        axes.text(
            left + width / 2,
            row,
            f"layer {layer}, expert {expert}",
            ha="center",
            va="center",
            fontsize=6.5,
            clip_on=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pipeline.png")
    args = parser.parse_args()
    profile = load_profile(ROOT / "profiles" / "rtx3090-1gbe.yaml")
    routes = random_routes(profile, 0)
    outcome = Simulator(profile, Alignment(1, 1), 4, routes, predictor(profile, routes, 1.0, 1)).run()
    start = outcome.token_s[1]
    title = "One token's first layers on ten nodes, aligned every token (simulated on the paper's timings)"
    draw(outcome.spans, start, start + 0.125, title, args.out)
    print(f"{args.out}: {outcome.tokens_per_s:.2f} tokens/s simulated")


if __name__ == "__main__":
    main()
