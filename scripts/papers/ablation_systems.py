"""What each part of a system is worth, step by step: importance Fig 16, Fate Fig 14, SMOE Figs 14 and 15.

    .venv/bin/python -m scripts.papers.ablation_systems                 # importance: disk loads, then emulated
    .venv/bin/python -m scripts.papers.ablation_systems --paper fate    # half an hour each
    .venv/bin/python -m scripts.papers.ablation_systems --how disk      # only on this machine's own times
    .venv/bin/python -m scripts.papers.ablation_systems --batch 3       # three prompts at once

Importance. Baseline: a static hot set, as llama.cpp keeps one, and misses computed on the host; +loads: misses are
loaded instead; +CE: score-window eviction; +ER: the expert-cache router; +Pre: the next layer's top-score experts are
prefetched; +BA: the CPU-load balancer. The paper's +CE is +loads and +CE together; here each step changes one thing.
Without a GPU this machine has one place to compute an expert at: from the disk the steps begin with +loads and end with
+Pre. Fate. Loads on demand; +Pre: what the gate before predicts is prefetched; +cache: shallow layers first, ARC in the
others; +int4: experts in int4, unpopular ones in int2. SMOE. The cache alone, N experts a layer prefetched by the
token-wise network, by the next layer's gate (`gate`), and N = 2 if it pays (`flex`); a change from line to line.

With --batch several prompts are answered at once: the router's set C and its replacements, and the balancer's batch
sizes, are then over the rows of all, and TPOT is the time of a pass, which gives each of them a token.

Medians over prompts; ratios are each prompt's to the step before and to the first step, with an interval of 95 %. A *
marks figures during which others used more than a tenth of a core.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from scripts.lib.bench import Bench, batch_flag, batch_suffix, in_drawn_order, parse_system_flags, system_flags
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags
from scripts.lib.plots import BLUE, DARK, PALE, canvas
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table
from scripts.papers.compare_systems import show

VERSION = 4


@dataclass(frozen=True, slots=True)
class Series:
    figure: str
    """What the paper calls it."""
    steps: dict[str, dict[str, Any]]
    """Names, without a space, and what each changes of the one before."""
    with_host: tuple[str, ...] = ()
    """Steps that need a second place to compute at."""


SERIES = {
    "importance": Series(
        "Fig 16",
        {
            "baseline": {"residency": "static", "router": "top-k", "predictor": "none", "placement": "resident"},
            "+loads": {"placement": "device"},
            "+CE": {"residency": "score"},
            "+ER": {"router": "expert-cache"},
            "+Pre": {"predictor": "next-layer"},
            "+BA": {"placement": "balance"},
        },
        ("baseline", "+BA"),
    ),
    "fate": Series(
        "Fig 14",
        {
            "on-demand": {"predictor": "none", "residency": "none", "precision": "full"},
            "+Pre": {"predictor": "cross-layer"},
            "+cache": {"residency": "shallow-arc"},
            "+int4": {"precision": "popular"},
        },
    ),
    "smoe": Series(
        "Figs 14 and 15",
        {
            "cache": {"predictor": "none"},
            "N=1": {"predictor": "token-wise", "prefetch": 1},
            "N=2": {"prefetch": 2},
            "N=3": {"prefetch": 3},
            "gate,N=1": {"predictor": "next-gate", "prefetch": 1},
            "gate,N=2": {"prefetch": 2},
            "flex,N=2": {"predictor": "token-wise-flex"},
        },
    ),
}
"""By system."""
HOWS = ("disk", "emulated")


def variants(args: Any) -> dict[str, dict[str, Any]]:
    """`disk +ER` -> its settings, the steps before it included."""
    found, series = {}, SERIES[args.paper]
    for how in args.how:
        settings: dict[str, Any] = {"system": args.paper}
        settings |= {"alpha": args.alpha} if args.paper == "importance" else {}
        settings |= {"profile": args.profile} if how == "emulated" else {}
        for step, change in series.steps.items():
            settings = settings | change
            if how == "emulated" or step not in series.with_host:
                found[f"{how} {step}"] = settings
    return found


def plan(bench: Bench, args: Any) -> list[Cell]:
    """Budget by budget and prompt by prompt every step, in a drawn order."""
    wanted = []
    for model in args.models:
        of = bench.conditions(model)
        for how in args.how:
            steps = [name for name in bench.variants if name.startswith(how)]
            for budget in args.budgets:
                for n in range(args.prompts):
                    drawn = in_drawn_order(steps, args.seed, of["model"], budget, n)
                    cost = 2.0 * (1 + (args.history if n == 0 else 0))
                    wanted += [
                        Cell({**of, "budget": budget, "prompt": n, "step": one, **bench.variants[one]}, cost)
                        for one in drawn
                    ]
    return wanted


def rows(wanted: list[Cell], results: list[dict[str, Any]], args: Any) -> list[dict[str, Any]]:
    """One row a model, way, budget and step."""
    found: dict[tuple[str, str, int, str], dict[int, dict[str, Any]]] = {}
    for one, result in zip(wanted, results, strict=True):
        how, step = one.params["step"].split()
        found.setdefault((one.params["model"], how, one.params["budget"], step), {})[one.params["prompt"]] = result
    made = []
    for model, how, budget in dict.fromkeys(key[:3] for key in found):
        before: dict[int, dict[str, Any]] = {}
        first: dict[int, dict[str, Any]] = {}
        for step in SERIES[args.paper].steps:
            of = found.get((model, how, budget, step))
            if of is None:
                continue
            row = {"model": model, "how": args.profile if how == "emulated" else how, "budget": budget, "step": step}
            refused = next((one["refused"] for one in of.values() if "refused" in one), None)
            if refused is None:
                made.append({**row, **show.figures(_placed(of), _next_to(of, before)), **_of_first(of, first)})
                before, first = of, first or of
            else:
                made.append({**row, "refused": refused})
    return made


def _placed(of: dict[int, dict[str, Any]]) -> dict[int, dict[int, dict[str, Any]]]:
    return {n: {0: one} for n, one in of.items()}


def _next_to(of: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> show.Pairs:
    """Each prompt's answer, and that of another step."""
    return {n: [(one, [other[n]] if n in other else [])] for n, one in of.items()}


def _of_first(of: dict[int, dict[str, Any]], first: dict[int, dict[str, Any]]) -> dict[str, Any]:
    found = show.ratio("tpot_s", _next_to(of, first))
    return {f"first_{name}": value for name, value in found.items()}


COLUMNS = (
    Column("model", "model"),
    Column("way", "how"),
    Column("budget, %", "budget", "d"),
    Column("step", "step"),
    Column("TPOT, ms", show.milliseconds("tpot_s", ".2f")),
    Column("of the step before", show.interval("tpot")),
    Column("of the first", show.interval("first_tpot")),
    Column("hit rate", "hit_rate", ".1%"),
    Column("MB a token", "bytes_a_token", ".2f", 1e-6),
    Column("recall", "recall", ".1%"),
    Column("on the host", "host_computed", "g"),
    Column("cannot be", "refused"),
)


def picture(rows: list[dict[str, Any]], args: Any) -> Any:
    """TPOT as bars and the hit rate as a line, a panel a model, way and budget."""
    groups = list(dict.fromkeys((row["model"], row["how"]) for row in rows))
    figure, panels = canvas(
        3.5 * len(args.budgets) + 0.6, 2.7 * len(groups) + 0.7, len(groups), len(args.budgets), sharey="row"
    )
    for g, (model, how) in enumerate(groups):
        for b, budget in enumerate(args.budgets):
            panel = panels[g * len(args.budgets) + b]
            of = [
                row
                for row in rows
                if (row["model"], row["how"], row["budget"]) == (model, how, budget) and "refused" not in row
            ]
            times = [1e3 * row["tpot_s"] for row in of]
            panel.bar(range(len(of)), times, 0.62, color=PALE)
            for x, value in enumerate(times):
                panel.text(x, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
            panel.set_xticks(range(len(of)), [row["step"] for row in of], fontsize=9)
            panel.margins(y=0.18)
            right = panel.twinx()
            right.plot(range(len(of)), [100 * row["hit_rate"] for row in of], color=BLUE, marker="o", ms=5, lw=1.6)
            right.set_ylim(0, 104)
            right.tick_params(axis="y", colors=BLUE)
            right.spines["top"].set_visible(False)
            last = b == len(args.budgets) - 1
            right.set_ylabel("hit rate, %" if last else "", color=BLUE)
            title = "real disk loads" if how == "disk" else f"emulated: {how}"
            panel.set_title(f"{model}, {budget} % of the experts\n{title}", fontsize=9.5, color=DARK)
        panels[g * len(args.budgets)].set_ylabel("time per token, ms (bars)")
    figure.suptitle(
        f"{args.paper}, step by step ({SERIES[args.paper].figure} of its paper), medians of "
        f"{plural(args.prompts, 'prompt')}, answers of {args.tokens} tokens",
        fontsize=11,
    )
    return figure


def parse() -> Any:
    parser = system_flags(__doc__ or "", prompts=(5, 2), tokens=(64, 12), budgets=(10, 25, 50))
    parser.add_argument("--paper", choices=SERIES, default="importance", help="whose system; %(default)s unless said")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=list(HOWS), help="both unless said")
    common_flags(parser, "profile", profile="rtx3090-pcie3")
    batch_flag(parser)
    parser.add_argument("--alpha", type=float, default=0.3, help="of importance; %(default)s unless said")
    return parse_system_flags(parser)


def main() -> int:
    args = parse()
    header(f"{args.paper}, step by step, {plural(args.prompts, 'prompt')}, answers of {args.tokens}")
    with Bench(args, variants(args)) as bench:
        note = f"one worker; experts {bench.reads(args.models[0])}; {args.dtype}"
        note += f"; emulated where it says so: {args.profile}" if "emulated" in args.how else ""
        note += f"; {args.batch} prompts at once" if args.batch > 1 else ""
        name = f"ablation_{args.paper}" + "-emulated" * (args.how == ["emulated"]) + batch_suffix(args.batch)
        with Experiment(name, args, VERSION, {}, note) as run:
            wanted = plan(bench, args)
            found = rows(
                wanted,
                run.all(wanted, lambda one: bench.answer(one["path"], one["step"], one["budget"], one["prompt"])),
                args,
            )
            run.write(found)
            print(text_table(show.with_batch(COLUMNS, args.batch), found))
            print(run.written([run.save(picture(found, args))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
