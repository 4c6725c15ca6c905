"""Tables of the papers' own figures."""

from __future__ import annotations

from functools import partial

from scripts.doc_tables.readme import STATED_RUNS
from scripts.doc_tables.table import Rows, Table, across, down, named, pivot
from scripts.lib.tables import Column, Row, markdown_down
from scripts.papers import ablation_systems, prediction_show, recall
from scripts.papers.compare_systems import runs as compare_runs
from scripts.papers.compare_systems import show as compare_show
from scripts.papers.prefill import figures as prefill
from scripts.papers.routing import __main__ as routing
from scripts.simulated import fits

SYSTEMS = {
    "compare_systems-10": ("compare_systems", 10, "All systems from the disk, a tenth of the experts in memory"),
    "compare_systems-25": ("compare_systems", 25, ""),
    "compare_systems-50": ("compare_systems", 50, "All systems from the disk, half of the experts in memory"),
    "compare_systems-flex": ("compare_systems-flex", 25, "SMOE and SMOE-Flex, answers of 128 tokens"),
    "compare_systems-batch3": ("compare_systems-batch3", 25, "Three prompts at once, from the disk"),
    "compare_systems-total-60": ("compare_systems-total", 60, "All nodes together hold 60 % of the model"),
    "compare_systems-total-80": ("compare_systems-total", 80, "All nodes together hold 80 % of the model"),
    "compare_systems-emulated": ("compare_systems-emulated", 25, ""),
    "compare_systems-emulated-batch3": ("compare_systems-emulated-batch3", 25, "Three prompts at once, emulated"),
}
"""Name -> file of docs/data, budget in % of the experts, title."""
SYSTEMS_RUNS = ("compare_systems", "compare_systems-run2", "compare_systems-run3", "compare_systems-run4")
MODELS = ("many-moe", "fine-moe", "demo-moe", "deep-moe")
STEPS = named(
    ablation_systems.COLUMNS,
    "step",
    "TPOT, ms",
    "of the step before",
    "of the first",
    "hit rate",
    "MB a token",
    "recall",
)


def _whole_and_ends(rows: Rows) -> str:
    """Of each model all layers together, the first and the last."""
    shown = [
        row
        for row, after in zip(rows, [*rows[1:], {"layer": "all"}], strict=True)
        if row["layer"] in ("all", "0") or after["layer"] == "all"
    ]
    return markdown_down(routing.COLUMNS, shown)


def _case(row: Row) -> str:
    return f"{row['case']}: {row['is']}"


def _spread(row: Row) -> str:
    return f"{row['decode_tokens_per_s']:.2f} ± {row['deviation']:.2f}"


def _periods(row: Row) -> str:
    if row.get("predictor", "sep") != "sep":
        return "no shadow"
    return ", ".join(str(row[of]) if row[of] else "never" for of in ("token_period", "kv_period"))


TABLES = {
    "recall": Table(
        "recall",
        pivot(
            Column("token, KV rows aligned every", _periods),
            recall.COLUMNS[0],
            Column("recall", "recall", ".2%"),
        ),
    ),
    "fits": Table(
        "fits",
        across(fits.COLUMNS[2:], lambda row: f"{1e3 * row['load_s']:g} and {1e3 * row['shadow_layer_s']:g} ms"),
        "Times that fit the paper's speed equally well",
    ),
    "ablation": Table("ablation", pivot(Column("case", _case), Column("how", "how"), Column("tokens/s", _spread))),
    **{
        f"sweep_alignment-{shadow}": Table(
            f"sweep_alignment-{shadow}",
            pivot(
                Column("token, KV rows aligned every", _periods),
                Column("profile", "profile"),
                Column("tokens/s", lambda row: f"{row['decode_tokens_per_s']:.2f} ({row['recall']:.1%})"),
            ),
        )
        for shadow in ("int8", "nf4")
    },
    "sweep_minibatch": Table(
        "sweep_minibatch",
        pivot(
            Column("rows", "mini_batch"),
            Column("prompt", lambda row: f"{row['prompt_tokens']} tokens, {row['prefill']}"),
            Column("TTFT", "ttft_s", ".2f"),
        ),
    ),
    "prefill": Table(
        "prefill-simulated", prefill.wide, "Time to first token, simulated, in seconds and over on-demand's"
    ),
    "prefill-disk": Table(
        "prefill-disk", prefill.wide, "Time to first token, from this machine's disk, in seconds and over on-demand's"
    ),
    "prefill-row-by-row": Table(
        "prefill-simulated-host-1ms",
        prefill.wide,
        "The same simulated with a CPU that takes each row by itself",
    ),
    "prefill-disk-runs": Table(
        "prefill-disk-earlier prefill-disk",
        partial(compare_runs.ratios_table, short="ttft", across="prompt_tokens", head="{} tokens"),
        "Time to first token from the disk over on-demand's, in two runs",
    ),
    "prediction": Table(" ".join(f"prediction-{name}" for name in MODELS), prediction_show.table),
    "routing": Table("routing", _whole_and_ends, "What gates choose"),
    "compare_systems-runs": Table(
        " ".join(SYSTEMS_RUNS), partial(compare_runs.runs_table, budget=25, runs=STATED_RUNS)
    ),
    **{
        name: Table(data, partial(compare_show.budget_table, budget=budget), title)
        for name, (data, budget, title) in SYSTEMS.items()
    },
    **{
        f"ablation_{paper}{how}": Table(f"ablation_{paper}{how}", down(STEPS), f"Step by step: {paper}, {place}")
        for how, place in (("", "from this machine's disk"), ("-emulated", "emulated beside a CPU"))
        for paper in ablation_systems.SERIES
    },
}
"""Name -> table."""
