"""Tokens/s and accepted drafts over the drafts of a block, and tokens/s and waiting times over requests at once.

    .venv/bin/python -m scripts.papers.sweep_draft                               # simulated, some minutes
    .venv/bin/python -m scripts.papers.sweep_draft --acceptance 0.1 --tokens 512

Simulated with random routes at the recall of the paper's int8 shadow. `--acceptance`: the share of the shadow's own
tokens that are the main model's. Random routes need more experts a block than those of real text, which are more alike.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from scheduler.drafts.length import AUTO, MOST_DRAFTS
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import PROFILE, RECALL, Scenario
from scheduler.simulation.simulate import simulate_requests
from scheduler.simulation.workload import SAME_TOKEN
from scheduler.timing.profile import Profile, find_profile
from scripts.lib.flags import positive, script_parser
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table

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
OVER_DRAFTS = (Column("acceptance", "acceptance", ".2f"), Column("drafts", "draft"), *_FIGURES)
OVER_REQUESTS = (
    Column("acceptance", "acceptance", ".2f"),
    Column("drafts", "draft"),
    Column("requests", "requests", "d"),
    *_FIGURES,
    Column("next token s", "gap_s", ".3f"),
    Column("at worst", "worst_gap_s", ".3f"),
)


def figures(
    profile: Profile, acceptance: float, draft: int | str, requests: int, tokens: int, batch_dense: bool, seed: int = 0
) -> dict[str, Any]:
    """Of requests that are answered together, `tokens` tokens each. Gaps are between times at which a request gets
    tokens: those of a block come at once."""
    scenario = Scenario(profile, tokens=tokens, requests=requests, draft=draft, batch_dense=batch_dense)
    outcome = simulate_requests(scenario, random_arrivals(scenario, RECALL, seed, acceptance))
    blocks, rows, gained = outcome.drafted
    gaps = [gap for gap in outcome.gaps_s if gap > 0]
    return {
        "acceptance": acceptance,
        "draft": str(draft),
        "requests": requests,
        "tokens_per_s": outcome.decode_tokens_per_s,
        "rows": rows / blocks if blocks else 1.0,
        "accepted": (gained - blocks) / (rows - blocks) if rows > blocks else None,
        "loads_a_token": outcome.loads_a_token,
        "union": outcome.union,
        "bound": outcome.bound,
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
    parser.add_argument("--acceptance", nargs="+", type=_share, default=[SAME_TOKEN, 0.9, 0.1], help="%(default)s")
    parser.add_argument("--draft", nargs="+", type=_draft, default=list(DRAFTS), help="%(default)s")
    parser.add_argument("--requests", nargs="+", type=positive, default=list(REQUESTS), help="%(default)s")
    parser.add_argument("--tokens", type=positive, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--batch-dense", action="store_true", help="compute dense layers together")
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error(f"--tokens is {args.tokens}; allowed: 2, 3, ...")
    return args


def main() -> int:
    args = parse()
    profile = find_profile(args.profile)
    header(f"Drafts, simulated: {profile.name}, answers of {args.tokens} tokens")
    settings = args.tokens, args.batch_dense
    alone = [figures(profile, share, draft, 1, *settings) for share in args.acceptance for draft in args.draft]
    print(f"{text_table(OVER_DRAFTS, alone)}\n", flush=True)
    several = [
        figures(profile, share, draft, count, *settings)
        for share in args.acceptance
        for draft in (0, AUTO)
        for count in args.requests
    ]
    print(text_table(OVER_REQUESTS, several))
    print(save_rows("sweep_draft", [*alone, *several]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
