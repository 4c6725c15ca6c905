"""Drafts on the emulated testbed: tokens a second over those without drafts, over every expert in a slot, and over one
request.

    .venv/bin/python -m scripts.measure.drafts --quick

The engine runs for real, at the times of a profile that is `--slowdown` times as slow, so that the rows of a block,
which a cluster of ten computes on ten machines, do not compete for this one's cores; tokens a second are given as of
the profile itself. The cases take turns. `bad text`: tokens are drawn at a high temperature, so that few of the
shadow's are the main model's. Figures are of the time in which all requests decode.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from main_node.sampling import GREEDY, Sampling
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.lib.timing.idleness import Others

BAD = Sampling(temperature=4.0, top_k=0, seed=1)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    settings: dict[str, Any]
    requests: int = 1
    sampling: Sampling = GREEDY


CASES = (
    Case("fully cached", {"system": "fully-cached"}),
    Case("no drafts", {"shadow": "int8"}),
    Case("no drafts, two slots", {"shadow": "int8", "slots": 2}),
    Case("8 drafts", {"shadow": "int8", "draft": 8}),
    Case("16 drafts", {"shadow": "int8", "draft": 16}),
    Case("auto", {"shadow": "int8", "draft": "auto"}),
    Case("bad text, no drafts", {"shadow": "int8"}, sampling=BAD),
    Case("bad text, auto", {"shadow": "int8", "draft": "auto"}, sampling=BAD),
    Case("8 requests, no drafts", {"shadow": "int8", "batch_dense": True}, 8),
    Case("8 requests, auto", {"shadow": "int8", "batch_dense": True, "draft": "auto"}, 8),
)
OVER = (("fully_cached", "fully cached"), ("none", "no drafts"))
COLUMNS = (
    Column("case", "case"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("rows a pass", "rows", ".2f"),
    Column("accepted", "accepted", ".0%"),
    Column("loads a token", "loads_a_token", ".1f"),
    Column("over fully cached", "over_fully_cached", ".2f"),
    Column("over no drafts", "over_none", ".2f"),
)


def decode(cluster: Any, prompts: list[list[int]], tokens: int, sampling: Sampling) -> tuple[float, list[Any]]:
    """Tokens a second of the time in which all answers are decoded, and their reports."""

    def ask(prompt: list[int]) -> tuple[list[float], Any]:
        times, report = [], None
        for step in cluster.generate(prompt, tokens, ignore_eos=True, sampling=sampling):
            report = step.report
            if step.token_id is not None:
                times.append(time.monotonic())
        return times, report

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    begin, end = max(times[0] for times, _ in answers), min(times[-1] for times, _ in answers)
    waited = max(report.shadow_wait_s for _, report in answers)
    count = sum(begin < at <= end for times, _ in answers for at in times)
    return count / (end - begin - waited), [report for _, report in answers]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._profile = f"{args.profile}@{args.slowdown:g}"
        self._store = prepare_store(str(ROOT / "models" / args.model), None, "float32")

    def turn(self, case: Case, number: int) -> dict[str, Any]:
        args = self._args
        common = {"model": str(self._store.dense), "profile": self._profile, "threads": 1}
        settings = Settings(**common, parallel=case.requests, **case.settings)
        cluster = start_cluster(settings, self._store)
        try:
            prompts = self._prompts(case.requests, number)
            cluster.generate(prompts[0], 2, ignore_eos=True).close()  # the shadow is there from now on
            with Others() as others:
                rate, reports = decode(cluster, prompts, args.tokens, case.sampling)
        finally:
            cluster.close()
        drafted, accepted = (sum(getattr(one, name) for one in reports) for name in ("drafted", "accepted"))
        decoded = sum(one.new_tokens - 1 for one in reports)
        return {
            "case": case.name,
            "tokens_per_s": rate * args.slowdown,
            "rows": (drafted + decoded - accepted) / (decoded - accepted),
            "accepted": accepted / drafted if drafted else None,
            "loads_a_token": sum(one.loads - one.prefill_loads for one in reports) / decoded,
            "recall": statistics.fmean(one.recall for one in reports) if reports[0].recall is not None else None,
            "others_cores": others.cores,
        }

    def _prompts(self, count: int, number: int) -> list[list[int]]:
        from odmoe.text import load_tokenizer
        from scripts.lib.prompts import prompts_of_length

        found = prompts_of_length(load_tokenizer(self._store.dense), count + number, self._args.prompt_tokens)
        return found[number:]


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="deep-moe", help="in models/ (%(default)s)")
    parser.add_argument("--profile", default="rtx3090-1gbe", help="(%(default)s)")
    parser.add_argument("--slowdown", type=float, default=4.0, help="of the profile (%(default)g)")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="CASE", help="(all)")
    parser.add_argument("--prompt-tokens", type=positive, default=16, help="(%(default)s)")
    parser.add_argument("--tokens", type=positive, help="of each answer (128; --quick: 48)")
    parser.add_argument("--turns", type=positive, help="(3; --quick: 1)")
    parser.add_argument("--quick", action="store_true", help="one turn of short answers")
    args = parser.parse_args()
    args.tokens = args.tokens or (48 if args.quick else 128)
    args.turns = args.turns or (1 if args.quick else 3)
    return args


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each case over its turns, and of its ratios in the same turn."""
    found = []
    for case in CASES:
        mine = [row for row in rows if row["case"] == case.name]
        if not mine:
            continue
        one: dict[str, Any] = {"case": case.name}
        for name in ("tokens_per_s", "rows", "accepted", "loads_a_token", "recall"):
            known = [row[name] for row in mine if row[name] is not None]
            one[name] = statistics.median(known) if known else None
        for name, base in OVER:
            if name == "none" and case.sampling is BAD:
                base = f"bad text, {base}"
            others = {row["turn"]: row["tokens_per_s"] for row in rows if row["case"] == base}
            ratios = [row["tokens_per_s"] / others[row["turn"]] for row in mine if row["turn"] in others]
            one[f"over_{name}"] = statistics.median(ratios) if ratios else None
        found.append(one)
    return found


def main() -> int:
    args = parse()
    prepare_process()
    prepare_libraries(1)
    header("Drafts on the emulated testbed")
    rows: list[dict[str, Any]] = []
    bench = Bench(args)
    for turn in range(args.turns):
        for case in CASES:
            if args.cases and case.name not in args.cases:
                continue
            rows.append(bench.turn(case, turn) | {"turn": turn})
            print(f"turn {turn + 1}: {case.name}: {rows[-1]['tokens_per_s']:.2f}", file=sys.stderr, flush=True)
    print(text_table(COLUMNS, summary(rows)))
    print(f"\n{save_rows('drafts-quick' if args.quick else 'drafts', rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
