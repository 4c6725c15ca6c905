"""The table and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.lib.plots import AMBER, BLUE, DARK, PALE, canvas
from scripts.lib.tables import Column, text_table
from scripts.peers.checkpoints import Shape
from scripts.peers.engines import ACCELERATE, EAGER, LLAMA
from scripts.peers.figures import CACHED, CAPPED, FITS, QUARTER, is_llama, said

PEERS = (EAGER, ACCELERATE, LLAMA)
CASES = (FITS, QUARTER, CAPPED)
COLUMNS = (
    Column("model", "model"),
    Column("memory", lambda row: _memory(row)),
    Column("engine", "engine"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("TTFT s", "ttft_s", ".2f"),
    Column("start s", "start_s", ".1f"),
    Column("peak GB", "peak_bytes", ".2f", 1e-9),
    Column("read MB/token", "read_bytes_a_token", ".0f", 1e-6),
    Column("hit rate", "hit_rate", ".0%"),
    Column("agreement", "agreement", ".1%"),
    Column("decode over", lambda row: _over(row, "decode")),
    Column("TTFT over", lambda row: _over(row, "ttft")),
)


def described(shape: Shape) -> str:
    """A checkpoint in a few words."""
    return (
        f"{shape.experts} experts, top-{shape.top_k}, {shape.hidden} x {shape.inner}, {shape.layers} layers, "
        f"{shape.expert_bytes / 1e9:.1f} GB of experts"
    )


def _over(row: Any, what: str) -> str | None:
    """The ratios of a row to others, `0.95 (0.94 to 0.96) Transformers eager`."""
    found = [
        f"{said(value)} {key.partition(' over ')[2]}" for key, value in row.items() if key.startswith(f"{what} over ")
    ]
    return ", ".join(found) or None


def _memory(row: Any) -> str:
    return {FITS: "all experts", QUARTER: "a quarter"}.get(row["case"]) or f"a quarter, limit {row['cap'] / 1e9:.2f} GB"


def ran(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of engines that did not fail: by model and memory, fastest first."""
    found = [row for row in rows if "failed" not in row]
    return sorted(found, key=lambda row: (row["model"], CASES.index(row["case"]), -row["tokens_per_s"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What failed stands below."""
    failed = [f"{row['model']}, {_memory(row)}: {row['engine']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([text_table(COLUMNS, ran(rows)), *failed])


def picture(rows: Sequence[dict[str, Any]], args: Any) -> Any:
    """Decode speed: two panels a model, all in memory and a quarter in memory."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    bars = [[_bars(rows, model, fits) for model in models] for fits in (True, False)]
    heights = [max(map(len, one)) for one in bars]
    figure, panels = canvas(
        4.6 * len(models), 0.235 * sum(heights) + 1.7, 2, len(models), gridspec_kw={"height_ratios": heights}
    )
    for number, panel in enumerate(panels):
        fits, model = number < len(models), models[number % len(models)]
        mine = bars[not fits][number % len(models)]
        _draw(panel, mine)
        shape = args.shapes[model]
        memory = "all in memory" if fits else "a quarter in memory"
        panel.set_title(f"{shape.experts} experts, top-{shape.top_k}: {memory}", fontsize=9)
        panel.set_ylim(max(heights[not fits], 1) - 0.5, -0.5)
        if not fits:
            panel.set_xlabel("decoded tokens/s", fontsize=8)
    return figure


def _bars(rows: Sequence[dict[str, Any]], model: str, fits: bool) -> list[dict[str, Any]]:
    """What a panel shows, fastest first. A system that also ran under the cap is shown as it ran there."""
    mine = [row for row in rows if row["model"] == model and "failed" not in row]
    if fits:
        found = [row for row in mine if row["case"] == FITS]
    else:
        capped = [row for row in mine if row["case"] == CAPPED]
        names = {row["engine"] for row in capped}
        found = capped + [row for row in mine if row["case"] == QUARTER and row["engine"] not in names]
    return sorted(found, key=lambda row: -row["tokens_per_s"])


def _draw(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    best = next((row["engine"] for row in rows if row["case"] == CAPPED and not _is_peer(row["engine"])), CACHED)
    most = max((row["tokens_per_s_high"] for row in rows), default=1.0)
    for place, row in enumerate(rows):
        name, rate = row["engine"], row["tokens_per_s"]
        ours = not _is_peer(name)
        colour = AMBER if not ours else BLUE if name == best else PALE
        low, high = rate - row["tokens_per_s_low"], row["tokens_per_s_high"] - rate
        panel.barh(place, rate, height=0.72, color=colour)
        panel.errorbar(rate, place, xerr=[[low], [high]], color=DARK, lw=0.8, capsize=1.5)
        panel.text(row["tokens_per_s_high"] + 0.02 * most, place, _label(row), va="center", fontsize=7.5, color=DARK)
    panel.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=8)
    panel.set_xlim(0, 1.3 * most)
    panel.tick_params(axis="x", labelsize=7.5)
    panel.tick_params(axis="y", length=0)


def _is_peer(name: str) -> bool:
    return name in PEERS or is_llama(name)


def _name(row: dict[str, Any]) -> str:
    name = row["engine"]
    if is_llama(name) and name != LLAMA:
        return name
    if name in PEERS:
        plain = {EAGER: "Transformers", ACCELERATE: "accelerate, experts on disk", LLAMA: "llama.cpp"}[name]
        return f"{plain}, mmap" if name == LLAMA and row["case"] == CAPPED else plain
    return f"OD-MoE, {'all cached' if name == CACHED else name}"


def _label(row: dict[str, Any]) -> str:
    """Tokens/s, and memory."""
    rate = row["tokens_per_s"]
    return f"{rate:.1f}  ({row['peak_bytes'] / 1e9:.1f} GB)" if rate < 100 else f"{rate:.0f}"
