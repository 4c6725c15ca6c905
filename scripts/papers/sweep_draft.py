"""Tokens/s and accepted drafts over the drafts of a block and the shadow's precision, and over requests at once.

    .venv/bin/python -m scripts.papers.sweep_draft                               # simulated, some minutes
    .venv/bin/python -m scripts.papers.sweep_draft --shadow int8 --acceptance 0.1 --tokens 512

Simulated with random routes, at the recall of the paper's shadows. `--acceptance`: the share of the shadow's own tokens
that are the main model's, in place of those measured. Random routes need more experts a block than those of real text,
which are more alike. The second panel is the curve of throughput against latency: requests that are answered together.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from statistics import median
from typing import Any

from scheduler.drafts.length import AUTO, MOST_DRAFTS
from scheduler.planning.scaling import RECALLS
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import PROFILE, Scenario
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.profile import Profile, find_profile
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.plots import AMBER, BLUE, DARK, canvas, write_foot
from scripts.lib.provenance import command, header, machine, save_rows
from scripts.lib.tables import Column, text_table

SCHEMES = {
    "fp16": (RECALLS["fp16"], 1.0),
    "int8": (RECALLS["int8"], 0.995),
    "nf4": (RECALLS["nf4"], 0.94),
}
"""Precision of the shadow -> recall, and the share of single drafts that were right: 620 of 620, 605 of 608, 596 of 634
(`scripts.measure.exactness --requests 1 --drafts 1` on models/demo-moe)."""
COLOURS = {"fp16": DARK, "int8": BLUE, "nf4": AMBER}
DRAFTS: tuple[int | str, ...] = (0, 1, 3, 7, 15, AUTO)
REQUESTS = (1, 2, 4, 8, 16)

_FIGURES = (
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("rows a pass", "rows", ".2f"),
    Column("accepted", "accepted", ".0%"),
    Column("loads a token", "loads_a_token", ".1f"),
    Column("experts a layer", "union", ".2f"),
    Column("bound", "bound"),
)
_SHADOW = (Column("shadow", "shadow"), Column("acceptance", "acceptance", ".3f"), Column("drafts", "draft"))
OVER_DRAFTS = (*_SHADOW, *_FIGURES)
OVER_REQUESTS = (
    *_SHADOW,
    Column("requests", "requests", "d"),
    *_FIGURES,
    Column("next token s", "gap_s", ".3f"),
    Column("at worst", "worst_gap_s", ".3f"),
)


def figures(
    profile: Profile,
    shadow: str,
    acceptance: float | None,
    draft: int | str,
    requests: int,
    tokens: int,
    batch_dense: bool,
) -> dict[str, Any]:
    """Of requests that are answered together, `tokens` tokens each. Gaps are between times at which a request gets
    tokens: those of a block come at once."""
    scenario = Scenario(profile, tokens=tokens, requests=requests, draft=draft, batch_dense=batch_dense)
    recall, measured = SCHEMES[shadow]
    acceptance = measured if acceptance is None else acceptance
    outcome = simulate_requests(scenario, random_arrivals(scenario, recall, 0, acceptance))
    blocks, rows, gained = outcome.drafted
    gaps = [gap for gap in outcome.gaps_s if gap > 0]
    return {
        "shadow": shadow,
        "acceptance": acceptance,
        "draft": str(draft),
        "requests": requests,
        "tokens_per_s": outcome.decode_tokens_per_s,
        "rows": rows / blocks if blocks else 1.0,
        "accepted": (gained - blocks) / (rows - blocks) if rows > blocks else None,
        "loads_a_token": outcome.loads_a_token,
        "union": outcome.union,
        "bound": outcome.bound,
        "mean_gap_s": requests / outcome.decode_tokens_per_s if outcome.decode_tokens_per_s else None,
        "gap_s": median(gaps),
        "worst_gap_s": max(gaps),
    }


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}; allowed: a number from 0 to 1")
    return value


def _draft(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) > MOST_DRAFTS:
        raise argparse.ArgumentTypeError(f"{text}; allowed: {AUTO}, 0, 1, ... {MOST_DRAFTS}")
    return int(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--profile", default=PROFILE, help="%(default)s")
    parser.add_argument("--acceptance", nargs="+", type=_share, default=[None], help="as measured")
    parser.add_argument("--shadow", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="%(default)s")
    parser.add_argument("--draft", nargs="+", type=_draft, default=list(DRAFTS), help="%(default)s")
    parser.add_argument("--requests", nargs="+", type=positive, default=list(REQUESTS), help="%(default)s")
    parser.add_argument("--tokens", type=positive, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--batch-dense", action="store_true", help="compute dense layers together")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory to write to; results/ unless said")
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error(f"--tokens is {args.tokens}; allowed: 2, 3, ...")
    return args


def main() -> int:
    args = parse()
    profile = find_profile(args.profile)
    header(f"Drafts, simulated: {profile.name}, answers of {args.tokens} tokens")
    settings = args.tokens, args.batch_dense
    shadows = list(itertools.product(args.shadow, args.acceptance))
    alone = [figures(profile, *shadow, draft, 1, *settings) for shadow in shadows for draft in args.draft]
    print(f"{text_table(OVER_DRAFTS, alone)}\n", flush=True)
    several = [
        figures(profile, *shadow, draft, count, *settings)
        for shadow in shadows
        for draft in (0, AUTO)
        for count in args.requests
    ]
    print(text_table(OVER_REQUESTS, several))
    print(save_rows("sweep_draft", [*alone, *several], args.out))
    print(draw(profile.name, alone, several, args.out))
    return 0


def draw(profile: str, alone: list[dict[str, Any]], several: list[dict[str, Any]], folder: Path) -> Path:
    """Speed over drafts, and the time between a request's tokens over the speed of all requests."""
    figure, (left, right) = canvas(10.4, 4.4, 1, 2)
    for shadow, acceptance in dict.fromkeys((row["shadow"], row["acceptance"]) for row in alone):
        colour, words = COLOURS[shadow], f"{shadow}, {acceptance:.1%} right"
        of = [row for row in alone if (row["shadow"], row["acceptance"]) == (shadow, acceptance)]
        fixed = [row for row in of if row["draft"] != AUTO]
        places = [int(row["draft"]) for row in fixed], [row["tokens_per_s"] for row in fixed]
        left.plot(*places, color=colour, marker="o", ms=5, lw=1.4, label=words)
        for row in of:
            if row["draft"] == AUTO:
                left.axhline(row["tokens_per_s"], color=colour, ls=":", lw=1.2)
        for draft, style in (("0", "--"), (AUTO, "-")):
            at_once = [
                row
                for row in several
                if (row["shadow"], row["acceptance"], row["draft"]) == (shadow, acceptance, draft)
            ]
            places = [row["tokens_per_s"] for row in at_once], [row["mean_gap_s"] for row in at_once]
            right.plot(*places, color=colour, marker="o", ms=5, lw=1.4, ls=style)
            if shadow == "int8":
                for row, x, y in zip(at_once, *places, strict=True):
                    label = str(row["requests"])
                    right.annotate(label, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8, color=DARK)
    left.set_xlabel("drafts of a block (dotted: --draft auto)", fontsize=9)
    left.set_ylabel("tokens/s of one request", fontsize=9)
    right.set_xlabel("tokens/s of all requests (numbers: requests at once)", fontsize=9)
    right.set_ylabel("seconds a token of a request (dashed: no drafts)", fontsize=9)
    for panel in (left, right):
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
    title = f"What drafts are worth (simulated: {profile})"
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False, fontsize=8.5, title=title)
    write_foot(figure, [f"{command()}; {machine()}"])
    path = folder / "sweep_draft.png"
    figure.savefig(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
