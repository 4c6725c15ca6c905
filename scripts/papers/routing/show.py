"""The picture: a line of panels a model, each after a figure of the papers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from scripts.lib.experiment import plural
from scripts.lib.plots import AMBER, BLUE, DARK, PALE, RED, canvas

SHOWN = 3
"""Ranks, in multiples of top-k."""
TOKENS = 64
"""Of the heat map."""


def draw(rows: list[dict[str, Any]], routes: dict[str, list[list[int]]], prompts: int) -> Any:
    names = list(routes)
    figure, panels = canvas(19, 3.3 * len(names) + 0.7, len(names), 5)
    for n, name in enumerate(names):
        mine = [row for row in rows if row["model"] == name]
        whole, layers = mine[0], mine[1:]
        line = panels[5 * n : 5 * n + 5]
        _scores(line[0], whole)
        _reuse(line[1], whole)
        _cumulative(line[2], layers)
        _heat(line[3], routes[name], whole["experts"])
        _depth(line[4], layers)
        line[0].set_ylabel(f"{name}\nshare of the scores, %")
    for panel, title in zip(
        panels,
        (
            "Scores by rank (importance, Fig 4)",
            "Used by the next token, too (importance, Fig 11)",
            "Uses of the most used experts (SMOE, Fig 5)",
            "Experts over tokens, a middle layer (SMOE, Fig 6)",
            "Scores by rank and depth (Fate, Fig 8)",
        ),
        strict=False,
    ):
        panel.set_title(title, fontsize=9.5)
    figure.suptitle(f"What gates choose, in decoding: {plural(prompts, 'prompt')} of five kinds of text", fontsize=11)
    return figure


def _ranks(row: dict[str, Any]) -> range:
    return range(1, min(SHOWN * row["top_k"], row["experts"]) + 1)


def _scores(panel: Any, row: dict[str, Any]) -> None:
    """Of chosen experts dark, of others pale."""
    ranks = _ranks(row)
    colours = [BLUE if rank <= row["top_k"] else PALE for rank in ranks]
    panel.bar(ranks, [100 * row["scores"][rank - 1] for rank in ranks], 0.8, color=colours)
    panel.set_xlabel("rank; dark: chosen")


def _reuse(panel: Any, row: dict[str, Any]) -> None:
    panel.plot(range(1, row["experts"] + 1), [100 * one for one in row["reused"]], color=RED, lw=1.6)
    panel.axhline(100 * row["top_k"] / row["experts"], color=DARK, ls=":", lw=1)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("rank; dotted: chance")
    panel.set_ylabel("%")


def _three(layers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The first, a middle and the last layer."""
    return list(zip((layers[0], layers[len(layers) // 2], layers[-1]), (AMBER, PALE, BLUE), strict=True))


def _cumulative(panel: Any, layers: list[dict[str, Any]]) -> None:
    for row, colour in _three(layers):
        used = sorted(row["used"], reverse=True)
        shares = [100 * part / sum(used) for part in accumulate(used)]
        panel.plot([100 * (n + 1) / len(used) for n in range(len(used))], shares, color=colour, lw=1.6)
    panel.plot([0, 100], [0, 100], color=DARK, ls=":", lw=1)
    panel.set_xlabel("of the experts, %")
    panel.set_ylabel("of their uses, %")


def _heat(panel: Any, chosen: list[list[int]], experts: int) -> None:
    grid = [[float(expert in token) for token in map(set, chosen[:TOKENS])] for expert in range(experts)]
    panel.imshow(grid, aspect="auto", cmap="Greys", interpolation="nearest")
    panel.set_xlabel("token")
    panel.set_ylabel("expert")


def _depth(panel: Any, layers: list[dict[str, Any]]) -> None:
    for row, colour in _three(layers):
        ranks = _ranks(row)
        values = [100 * row["scores"][rank - 1] for rank in ranks]
        panel.plot(ranks, values, color=colour, lw=1.6, marker=".", label=f"layer {row['layer']}")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("rank")
    panel.legend(fontsize=8, frameon=False)
