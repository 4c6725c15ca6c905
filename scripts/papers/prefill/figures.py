"""Time to first token as rows, tables and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from scripts.lib.plots import AMBER, BLUE, DARK, PALE, PURPLE, RED, canvas
from scripts.lib.tables import Column, Row, markdown_down, text_table
from scripts.lib.timing.idleness import mark
from scripts.lib.timing.intervals import Interval
from scripts.papers.compare_systems import show
from scripts.papers.prefill.variants import IN_FULL, IN_TURN, ON_HOST, REFERENCE, VARIANTS

SHARES = ("link_busy", "host_busy", "device_busy")
COUNTS = ("loads", "hosted", "prefill_bytes")
AGAINST: dict[str, tuple[str, ...]] = {
    "smoe": (ON_HOST, "static", "hybrimoe"),
    "fate": (IN_TURN, REFERENCE, "eap"),
    IN_FULL: (IN_TURN, REFERENCE, "eap"),
    "importance": (IN_TURN, "static", "hybrimoe"),
}
"""A paper's system, and what it is compared with in prefill."""
PANELS: dict[str, tuple[str, ...]] = {
    "SMOE and its baselines": ("smoe", "hybrimoe", "static", ON_HOST),
    "Fate and its baselines": ("fate", IN_FULL, "eap", IN_TURN),
    "Importance and its baselines": ("importance", "hybrimoe", "moe-infinity", IN_TURN),
}
COLOURS = ((BLUE, "o"), (AMBER, "s"), (RED, "D"), (PURPLE, "^"))


def row_of(fixed: dict[str, Any], answers: list[dict[str, Any]], ratios: list[float | None]) -> dict[str, Any]:
    """One system at one length: medians over prompts. `ratios`: each answer's time over on-demand's, None if there
    is nothing next to it. What refuses to be has `refused`."""
    refused = next((one["refused"] for one in answers if "refused" in one), None)
    if refused is not None:
        return {**fixed, "refused": refused}
    row = {**fixed, "ttft_s": statistics.median(one["ttft_s"] for one in answers), "prompts": len(answers)}
    known = [one for one in ratios if one is not None]
    if known:
        interval = Interval.of(known)
        row |= {"ttft_ratio": interval.median, "ttft_ratio_low": interval.low, "ttft_ratio_high": interval.high}
        row["ttft_ratio_by_prompt"] = known
    for name in (*SHARES, *COUNTS):
        if name in answers[0]:
            row[name] = statistics.median(one[name] for one in answers)
    if "others_cores" in answers[0]:
        row["others_cores"] = max(one["others_cores"] for one in answers)
        row["ttft_others_cores"] = max(one.get("beside_cores", one["others_cores"]) for one in answers)
    return row


COLUMNS = (
    Column("system", "system"),
    Column("prompt", "prompt_tokens", "d"),
    Column("TTFT, s", "ttft_s", ".3f"),
    Column("of on-demand's", show.interval("ttft")),
    Column("loads", "loads", "g"),
    Column("on the host", "hosted", "g"),
    Column("MB", "prefill_bytes", ".1f", 1e-6),
    Column("link busy", "link_busy", ".0%"),
    Column("host busy", "host_busy", ".0%"),
    Column("device busy", "device_busy", ".0%"),
    Column("cannot be", "refused"),
)


def text(rows: Sequence[Row]) -> str:
    """For standard output; columns that nobody has a figure in are left out."""
    return text_table([one for one in COLUMNS if any(one.text(row) != "-" for row in rows)], rows)


def wide(rows: list[dict[str, Any]]) -> str:
    """In Markdown, a line a system and a column a length: seconds, and in parentheses the part of on-demand's; of
    measured times it follows a colon, with its interval, marked if others used the processor. At the longest prompt
    also how busy the link and the host were, if that is known."""
    lengths = sorted({row["prompt_tokens"] for row in rows})
    of = {(row["system"], row["prompt_tokens"]): row for row in rows}

    def cell(length: int) -> Column:
        def found(line: Row) -> str | None:
            row = of.get((line["system"], length), {})
            if "ttft_s" not in row:
                return None
            if "others_cores" in row:
                part = show.interval("ttft")(row)
                return f"{row['ttft_s']:.2f}" + (f": {part}" if part else mark(row["others_cores"]))
            return f"{row['ttft_s']:.3f} ({row['ttft_ratio']:.2f})" if "ttft_ratio" in row else f"{row['ttft_s']:.3f}"

        return Column(f"{length} tokens", found)

    def busy(line: Row) -> str | None:
        row = of.get((line["system"], lengths[-1]), {})
        return f"{row['link_busy']:.0%}, {row['host_busy']:.0%}" if "link_busy" in row else None

    columns = [Column("", "system"), *map(cell, lengths)]
    if any("link_busy" in row for row in rows):
        columns.append(Column(f"link, host busy at {lengths[-1]}", busy))
    return markdown_down(columns, [{"system": name} for name in dict.fromkeys(row["system"] for row in rows)])


def claims(rows: Sequence[Row]) -> list[str]:
    """Each paper's system over what it is compared with, by length."""
    of = {(row["system"], row["prompt_tokens"]): row["ttft_s"] for row in rows if "ttft_s" in row}
    lengths = sorted({length for _, length in of})
    found = []
    for system, others in AGAINST.items():
        for other in others:
            both = [n for n in lengths if (system, n) in of and (other, n) in of]
            times = ", ".join(f"{of[system, n] / of[other, n]:.2f} at {n}" for n in both)
            found += [f"{system} over {other}: {times}"] if both else []
    return found


def picture(rows: list[dict[str, Any]], title: str) -> Any:
    """A panel a paper: its system, what it is compared with, and pale all others."""
    figure, panels = canvas(4.0 * len(PANELS) + 0.4, 4.4, 1, len(PANELS), sharey=True)
    rows = [row for row in rows if "ttft_s" in row]
    lengths = sorted({row["prompt_tokens"] for row in rows})
    lines = {
        name: [(row["prompt_tokens"], row["ttft_s"]) for row in rows if row["system"] == name]
        for name in VARIANTS
        if any(row["system"] == name for row in rows)
    }
    for panel, (about, shown) in zip(panels, PANELS.items(), strict=True):
        for name, line in lines.items():
            if name not in (*shown, REFERENCE):
                panel.plot(*zip(*line, strict=True), color=PALE, lw=0.8, alpha=0.7, zorder=1)
        if REFERENCE in lines:
            panel.plot(*zip(*lines[REFERENCE], strict=True), color=DARK, ls="--", lw=1.2, label=REFERENCE, zorder=2)
        for (colour, sign), name in zip(COLOURS, shown, strict=True):
            if name in lines:
                line = lines[name]
                panel.plot(*zip(*line, strict=True), color=colour, marker=sign, ms=4.5, lw=1.6, label=name, zorder=3)
        panel.set_xscale("log")
        panel.set_xticks(lengths, [str(one) for one in lengths])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_title(about, fontsize=10)
        panel.set_xlabel("tokens of the prompt", fontsize=9)
        panel.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("time to first token, s", fontsize=9)
    figure.suptitle(f"{title}. Pale: the other systems", fontsize=11)
    return figure
