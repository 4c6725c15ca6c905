"""The picture of scripts/papers/prediction.py: four panels, each after a figure of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler.types import ModelShape
from scripts.lib.experiment import Experiment, plural
from scripts.lib.plots import AMBER, BLUE, DARK, PALE, PURPLE, RED, canvas
from scripts.lib.tables import markdown
from scripts.papers.prediction_count import Counts

SMOE = {
    "layer-wise": ("next-gate", BLUE, "-"),
    "iteration-wise": ("iteration-wise", AMBER, "-"),
    "token-wise": ("token-wise", RED, "-"),
    "path": ("path", PURPLE, "--"),
    "traces": ("traces", DARK, ":"),
}
FATE = {
    "next-gate, top-k": ("next-gate", BLUE, "-"),
    "75th percentile": ("cross-layer, 75th percentile", RED, "--"),
    "two layers ahead": ("stacked, 2 ahead", PURPLE, "--"),
    "three layers ahead": ("stacked, 3 ahead", PURPLE, ":"),
}

LINES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "Fate, Table 1: a layer's gate on the input of its own attention; of the gate before; of the attention before",
        ("position 1 decode rows", "position 2 decode rows", "position 3 decode rows"),
        "83.99; 78.79; 76.94",
    ),
    (
        "cosine of these three with the gate's own input, x 100",
        ("cosine 1 decode", "cosine 2 decode", "cosine 3 decode"),
        "93.1; 88.8; 83.8",
    ),
    (
        "Fate: prefill, experts of all rows together, on the input of the previous gate",
        ("position 2 prefill",),
        "over 99.6",
    ),
    (
        "Fate: in decoding, all experts above the 75th percentile",
        ("cross-layer, 75th percentile",),
        "97.15",
    ),
    ("SMOE, Fig 3: layer-; token-; iteration-wise", ("next-gate", "token-wise", "iteration-wise"), ""),
    (
        "importance: the next layer's attention and gate, with 0; 25; 50 % of a layer resident",
        tuple(f"next-layer, {share} % resident" for share in (0, 25, 50)),
        "",
    ),
    (
        "importance, Fig 18: of those predicted as top-score with 25 % resident, top-score; active",
        ("next-layer, 25 % resident: top-score", "next-layer, 25 % resident: active"),
        "82; 95",
    ),
    ("HOBBIT: gates two; three layers ahead", ("stacked, 2 ahead", "stacked, 3 ahead"), ""),
    ("activation path; request traces; chance", ("path", "traces", "random"), ""),
)
"""Of the table in the docs: what a line shows, its kinds of prediction, and what the paper prints."""


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown: a column a model, in percent; last the paper's. `of` of a row: its model."""
    values = {(row["of"], row["kind"]): row["value"] for row in rows if row["layer"] == "all"}
    models = list(dict.fromkeys(row["of"] for row in rows))
    lines = [["in %", *models, "the paper's own models"]]
    for about, kinds, paper in LINES:
        cells = ["; ".join(f"{100 * values[model, kind]:.1f}" for kind in kinds) for model in models]
        lines.append([about, *cells, paper])
    return markdown(lines)


def draw(run: Experiment, counts: Counts, shape: ModelShape, args: Any, name: str) -> Path:
    figure, panels = canvas(10.4, 8.2, 2, 2)
    _positions(panels[0], counts)
    _lines(panels[1], counts, shape, FATE, "The next layers' gates on this layer's input, by layer (Fate, Fig 7)")
    _lines(panels[2], counts, shape, SMOE, "Layer-, iteration- and token-wise, by layer (SMOE, Fig 3)")
    _importance(panels[3], counts)
    figure.suptitle(
        f"Predictors of {name}: {len(shape.layers)} MoE layers, top-{shape.top_k} of {shape.experts} experts, "
        f"{plural(args.prompts, 'prompt')} x at most {args.tokens} tokens",
        fontsize=11,
    )
    return run.save(figure)


def _percent(value: float | None) -> float:
    return float("nan") if value is None else 100 * value


def _positions(panel: Any, counts: Counts) -> None:
    """Grouped bars: cosine similarity and accuracy of the three positions."""
    series = {
        "cosine similarity, decoding": ("cosine {} decode", PALE),
        "accuracy, decoding": ("position {} decode rows", BLUE),
        "accuracy, prefill, row by row": ("position {} prefill rows", PURPLE),
        "accuracy, prefill, all rows' experts together": ("position {} prefill", AMBER),
    }
    width = 0.8 / len(series)
    for number, (label, (kind, colour)) in enumerate(series.items()):
        values = [_percent(counts.overall(kind.format(position))) for position in (1, 2, 3)]
        bars = panel.bar([at + number * width for at in range(3)], values, width * 0.92, color=colour, label=label)
        panel.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=6.5, padding=1)
    places = ("1: into this attention", "2: into the gate before", "3: into the attention before")
    panel.set_xticks([at + 1.5 * width for at in range(3)], places, fontsize=8)
    panel.set_ylim(0, 112)
    panel.set_yticks(range(0, 101, 20))
    panel.set_ylabel("%", fontsize=9)
    panel.set_title("Three positions of a gate's input (Fate, Table 1)", fontsize=9.5)
    panel.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=2)


def _lines(panel: Any, counts: Counts, shape: ModelShape, series: dict[str, tuple[str, str, str]], title: str) -> None:
    for label, (kind, colour, style) in series.items():
        overall = counts.overall(kind)
        if overall is None:
            continue
        values = [_percent(counts.layer(kind, layer)) for layer in shape.layers]
        panel.plot(
            shape.layers,
            values,
            color=colour,
            ls=style,
            lw=1.5,
            marker=".",
            ms=4,
            label=f"{label} {100 * overall:.1f} %",
        )
    chance = 100 * shape.top_k / shape.experts
    panel.axhline(chance, color=PALE, lw=0.9, zorder=0, label=f"chance {chance:.1f} %")
    panel.set_ylim(0, 103)
    panel.set_xlabel("layer", fontsize=9)
    panel.set_ylabel("accuracy, %", fontsize=9)
    panel.set_title(title, fontsize=9.5)
    panel.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)


def _importance(panel: Any, counts: Counts) -> None:
    """Over the share of resident experts: what is predicted top-score is so, and is active at all."""
    shares = sorted(
        float(kind.split()[1]) for kind in counts.by if kind.startswith("next-layer") and kind.endswith("resident")
    )
    names = {
        "top-score, of those predicted so": ": top-score",
        "active, of those predicted top-score": ": active",
        "top-k, of those chosen": "",
    }
    for (label, suffix), (colour, mark) in zip(names.items(), ((RED, "o"), (BLUE, "s"), (DARK, "^")), strict=True):
        values = [_percent(counts.overall(f"next-layer, {share:.0f} % resident{suffix}")) for share in shares]
        panel.plot(shares, values, color=colour, marker=mark, ms=5, lw=1.4, label=label)
    gate = counts.overall("next-gate")
    if gate is not None:
        panel.axhline(100 * gate, color=PALE, lw=1.2, ls="--", zorder=0, label=f"next-gate, top-k {100 * gate:.1f} %")
    panel.set_ylim(0, 103)
    panel.set_xlabel("resident experts of a layer, %", fontsize=9)
    panel.set_ylabel("%", fontsize=9)
    panel.set_title("Next layer's attention and gate, ahead (importance, Fig 18)", fontsize=9.5)
    panel.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
