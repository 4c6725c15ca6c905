"""Pictures of what `odmoe simulate --compare` and `--map` have written.

    .venv/bin/odmoe simulate --routes many-moe --map -o results/map.json          # five minutes
    .venv/bin/python -m scripts.simulated.maps results/map.json                   # results/map.png

Several load times, host times or batches: a panel for each batch and memory, in which every square is a load time and a
host time, with the mark of the fastest system and by how much it is faster than the next one. Else: decode speed and
misses a token over the memory, a line for each system, with dashed lines for bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.flags import script_parser
from scripts.lib.plots import BLUE, DARK, canvas, write_foot

MARKS = "os^Dv*PX<>dp|x1+"
COLOURS = (
    *(BLUE, "#f0b429", "#d64545", "#2a9d8f", "#8d6bb3", "#7f5539", "#222222", "#e377c2"),
    *("#6a994e", "#0096c7", "#ff7f0e", "#9b2226", "#5e60ce", "#94a3b8", "#005f73", "#b5179e"),
)
Points = list[dict[str, Any]]
Style = dict[str, tuple[str, str]]
"""System -> its colour and mark."""


def styles(points: Points) -> Style:
    """Each system has its own; the first one is the first that was compared."""
    systems = list(dict.fromkeys(one["system"] for one in points))
    return {name: (COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]) for number, name in enumerate(systems)}


def draw(points: Points) -> Any:
    """The figure. Raises SystemExit for a file without points."""
    if not points:
        raise SystemExit("the file has no points; write it with odmoe simulate --map -o FILE")
    places = {(one["load_ms"], one["host_ms"], one["batch"]) for one in points}
    return draw_map(points) if len(places) > 1 else draw_lines(points)


def ranked(points: Points) -> Points:
    """Fastest first, without bounds."""
    return sorted((one for one in points if not one["bound"]), key=lambda one: -one["tokens_per_s"])


def draw_map(points: Points) -> Any:
    batches, memories, loads, hosts = (
        list(dict.fromkeys(one[name] for one in points)) for name in ("batch", "device_memory", "load_ms", "host_ms")
    )
    style = styles(points)
    figure, panels = canvas(6.4, 0.8 + 2.1 * len(batches), len(batches), len(memories), sharex=True, sharey=True)
    winners: dict[str, Any] = {}
    for number, panel in enumerate(panels):
        batch, memory = batches[number // len(memories)], memories[number % len(memories)]
        for x, load in enumerate(loads):
            for y, host in enumerate(hosts):
                here = [
                    one
                    for one in points
                    if (one["batch"], one["device_memory"], one["load_ms"], one["host_ms"])
                    == (batch, memory, load, host)
                ]
                _square(panel, x, y, ranked(here), style, winners)
        panel.set(xlim=(-0.5, len(loads) - 0.5), ylim=(-0.5, len(hosts) - 0.5))
        panel.set_xticks(range(len(loads)), [f"{one:.2g}" for one in loads])
        panel.set_yticks(range(len(hosts)), ["-" if one is None else f"{one:.2g}" for one in hosts])
        panel.tick_params(labelsize=8, length=0)
        panel.set_title(f"{memory} of the experts, batch {batch}", fontsize=8)
        if number % len(memories) == 0:
            panel.set_ylabel("an expert on the host, ms", fontsize=8)
        if number // len(memories) == len(batches) - 1:
            panel.set_xlabel("a load, ms", fontsize=8)
    ordered = [name for name in style if name in winners]
    columns = min(4, max(1, len(ordered)))
    figure.legend(
        [winners[name] for name in ordered],
        [winners[name].get_label() for name in ordered],
        loc="outside upper center",
        ncols=columns,
        fontsize=8,
        frameon=False,
    )
    return figure


def _label(one: dict[str, Any]) -> str:
    kind = "bound" if one["bound"] else "" if one["exact"] else "approximate"
    return f"{one['system']} ({kind})" if kind else str(one["system"])


def _square(panel: Any, x: int, y: int, order: Points, style: Style, winners: dict[str, Any]) -> None:
    """The winner's mark, and how much faster it is than the next one: the stronger the colour, the more."""
    if not order:
        return
    first = order[0]
    gain = first["tokens_per_s"] / order[1]["tokens_per_s"] - 1 if len(order) > 1 else 0.0
    colour, mark = style[first["system"]]
    panel.add_patch(_rectangle((x - 0.5, y - 0.5), colour, 0.15 + 0.5 * min(1.0, gain / 0.5)))
    drawn = panel.scatter(x, y + 0.16, color=colour, edgecolors=DARK, linewidths=0.5, marker=mark, s=42, zorder=3)
    drawn.set_label(_label(first))
    winners.setdefault(first["system"], drawn)
    panel.text(x, y - 0.28, f"+{gain:.0%}", ha="center", va="center", fontsize=8, color=DARK)


def _rectangle(corner: tuple[float, float], colour: str, alpha: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, facecolor=colour, alpha=alpha, edgecolor="white", linewidth=1)


def draw_lines(points: Points) -> Any:
    style = styles(points)
    figure, (speed, misses) = canvas(6.4, 3.9, 1, 2)
    _lines(speed, points, style, "decoding, tokens/s", lambda one: one["tokens_per_s"])
    _lines(misses, points, style, "misses a token", lambda one: one["misses_a_token"])
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def _lines(
    panel: Any, points: Points, style: Style, title: str, value: Callable[[dict[str, Any]], float | None]
) -> None:
    memories = list(dict.fromkeys(one["device_memory"] for one in points))
    for name, (colour, mark) in style.items():
        own = [one for one in points if one["system"] == name]
        line = "--" if own[0]["bound"] else "-"
        label = _label(own[0])
        heights = [value(one) for one in own]
        panel.plot(range(len(own)), heights, line, color=colour, marker=mark, markersize=5, linewidth=1.3, label=label)
    panel.set_xticks(range(len(memories)), memories)
    panel.set_ylim(bottom=0)
    panel.margins(x=0.08)
    panel.tick_params(labelsize=8)
    panel.set_xlabel("experts in memory", fontsize=8)
    panel.set_title(title, fontsize=9)


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("file", type=Path, help="what odmoe simulate -o FILE.json has written")
    parser.add_argument("-o", "--output", type=Path, help="the picture; FILE.png unless said")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        found = json.loads(args.file.read_text("utf-8"))
        points, settings = found["points"], found["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{args.file} is no file of odmoe simulate -o FILE.json: {error}")
    figure = draw(points)
    said = ", ".join(f"{name} {value}" for name, value in settings.items()) or "random routes"
    write_foot(
        figure,
        [
            f"Simulated with odmoe simulate: {said}. In a map: how much faster than the next system. "
            "Bounds know the routes to come."
        ],
    )
    output = args.output or args.file.with_suffix(".png")
    figure.savefig(output)
    print(output)


if __name__ == "__main__":
    main()
