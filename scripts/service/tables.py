"""How the rows of each part are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.lib.tables import Column, text_table
from scripts.service.load import PERCENTILES

MIB = 1 / (1 << 20)


def counted(key: str) -> Any:
    """`30 whole, 2 wrong`."""
    return lambda row: ", ".join(f"{count} {what}" for what, count in row[key].items()) or None


MEMORY = (
    Column("MiB first", "rss_first", ".0f", MIB),
    Column("most", "rss_most", ".0f", MIB),
    Column("last", "rss_last", ".0f", MIB),
    Column("growth a minute", "rss_growth_a_minute", "+.1f", MIB),
)
LEFT = (
    Column("requests left", "requests_left", ".0f"),
    Column("threads", "threads_more", "+d"),
    Column("files", "files_more", "+d"),
)
SAW = (
    Column("requests", "requests", "d"),
    Column("whole", "whole", "d"),
    Column("wrong", "wrong", "d"),
    Column("stuck", "stuck", "d"),
    Column("429", "refused_429", "d"),
    Column("others", counted("others")),
)
TABLES = {
    "load": (
        Column("share", "share", "g"),
        Column("requests/s", "rate", ".2f"),
        *SAW,
        Column("at once: mean", "at_once_mean", ".1f"),
        Column("most", "at_once_most", "d"),
        Column("tokens/s", "tokens_per_s", ".1f"),
        *(Column(f"first token p{share} ms", f"ttft_p{share}_s", ".0f", 1e3) for share in PERCENTILES),
        *(Column(f"gap p{share} ms", f"gap_p{share}_s", ".0f", 1e3) for share in PERCENTILES),
        *MEMORY,
        *LEFT,
    ),
    "full queue": (Column("places", "places", "d"), *SAW, *LEFT),
    "cost": (
        Column("at once", "requests", "d"),
        Column("service over engine", "service_over_engine", ".3f"),
        Column("p25", "ratio_p25", ".3f"),
        Column("p75", "ratio_p75", ".3f"),
        Column("processor, service over engine", "cpu_over_engine", ".3f"),
        Column("service ms a token", "service_ms_a_token", ".2f"),
        Column("engine", "engine_ms_a_token", ".2f"),
        Column("processor ms: service", "service_cpu_ms_a_token", ".2f"),
        Column("engine", "engine_cpu_ms_a_token", ".2f"),
    ),
    "vanish": (
        Column("clients", "how"),
        Column("left in mid-answer", "mid_answer", "d"),
        Column("before the first token", "early", "d"),
        Column("others", counted("others")),
        *LEFT,
        Column("loads in flight", "loads_in_flight", "d"),
        Column("places", lambda row: f"{row['places_filled']} of {row['places']}"),
        *(Column(f"last load {name} ms", f"last_load_{name}_s", ".0f", 1e3) for name in ("p50", "p99", "worst")),
        *(Column(f"given up {name} ms", f"given_up_{name}_s", ".0f", 1e3) for name in ("p50", "p99", "worst")),
        *MEMORY,
    ),
    "fault": (
        Column("case", "case"),
        Column("clients", "clients"),
        Column("how many", "count", "d"),
        Column("saw", "saw"),
        Column("tokens", "tokens"),
        Column("longest pause s", "longest_pause_s", ".2f"),
        Column("last end s", "last_end_s", ".1f"),
        Column("requests left", "requests_left", ".0f"),
        Column("exit code", "exit_code", "d"),
    ),
}
"""Part -> columns."""


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each part that the rows have."""
    parts = [part for part in TABLES if any(row["part"] == part for row in rows)]
    return "\n\n".join(
        f"{part}\n{text_table(TABLES[part], [row for row in rows if row['part'] == part])}" for part in parts
    )
