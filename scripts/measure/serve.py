"""The HTTP service from outside: an open-loop load test, clients that vanish, faults while clients stream.

`load`: clients come by a Poisson process at shares of what a closed loop of --parallel clients is served, each streams
an answer, and every text is compared with the one that a lone request got. Beside it, the service and the engine alone
(a process each, on the same settings) take turns: the cost of HTTP a token. `vanish`: clients leave at random points.
`faults`: 32 clients stream from a local cluster while something happens; a table of what they saw.

    .venv/bin/python -m scripts.measure.serve --quick                  # some minutes
    .venv/bin/python -m scripts.measure.serve load --minutes 5
    .venv/bin/python -m scripts.measure.serve vanish --clients 500
    .venv/bin/python -m scripts.measure.serve faults --cases SIGTERM "killed worker"
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.service import faults
from scripts.service.engine import EngineAlone
from scripts.service.load import LoadTest, cost_rows
from scripts.service.server import ServerProcess
from scripts.service.vanish import Vanishing

MODES = ("load", "vanish", "faults")
NAME = DEMO.name
COST_TOKENS = 48


def load(args: argparse.Namespace) -> list[dict[str, Any]]:
    seconds = args.seconds or 60.0 * args.minutes
    with _server(args) as server:
        test = LoadTest(server, NAME, args.deadline, args.seed)
        rows = asyncio.run(test.rows(args.shares, seconds, args.parallel, args.queue))
    engine = EngineAlone(shadow=args.shadow, threads=args.threads, parallel=args.parallel)
    try:
        with _server(args) as server:
            return rows + asyncio.run(cost_rows(server, NAME, engine, args.at_once, COST_TOKENS, args.deadline))
    finally:
        engine.close()


def vanish(args: argparse.Namespace) -> list[dict[str, Any]]:
    with _server(args) as server:
        test = Vanishing(server, NAME, args.clients, min(args.clients, args.parallel + args.queue), args.seed)
        return asyncio.run(test.rows(args.alone))


def in_faults(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for case in args.cases:
        with ServerProcess(*_common(args), *faults.flags(case)) as server:
            rows.append(asyncio.run(faults.row(server, NAME, case)))
    return rows


def _server(args: argparse.Namespace) -> ServerProcess:
    places = ("--parallel", str(args.parallel), "--queue", str(args.queue))
    return ServerProcess("--shadow", args.shadow, *places, *_common(args))


def _common(args: argparse.Namespace) -> tuple[str, ...]:
    return ("--threads", str(args.threads), "--quiet", "--model-name", NAME)


def saw(row: Any) -> str:
    """`30 whole, 2 wrong`."""
    return ", ".join(f"{count} {what}" for what, count in row["saw"].items()) or "-"


MIB = 1 / (1 << 20)
MEMORY = (
    Column("MiB first", "rss_first", ".0f", MIB),
    Column("most", "rss_most", ".0f", MIB),
    Column("last", "rss_last", ".0f", MIB),
    Column("growth a minute", "rss_growth_a_minute", "+.1f", MIB),
)
TABLES = {
    "load": (
        Column("share", "share", "g"),
        Column("requests/s", "rate", ".2f"),
        Column("requests", "requests", "d"),
        Column("whole", "whole", "d"),
        Column("wrong", "wrong", "d"),
        Column("stuck", "stuck", "d"),
        Column("429", "refused_429", "d"),
        Column("others", lambda row: saw({"saw": row["others"]})),
        Column("most open", "most_open", "d"),
        Column("tokens/s", "tokens_per_s", ".1f"),
        *(Column(f"first token p{n} ms", f"ttft_p{n}_s", ".0f", 1e3) for n in (50, 95, 99)),
        *(Column(f"gap p{n} ms", f"gap_p{n}_s", ".0f", 1e3) for n in (50, 95, 99)),
        *MEMORY,
        Column("left", "requests_left", ".0f"),
        Column("threads", "threads_more", "+d"),
    ),
    "cost": (
        Column("at once", "requests", "d"),
        Column("service over engine", "service_over_engine", ".3f"),
        Column("least", "least_ratio", ".3f"),
        Column("most", "most_ratio", ".3f"),
        Column("processor, service over engine", "cpu_over_engine", ".3f"),
        Column("service ms a token", "service_ms_a_token", ".2f"),
        Column("engine ms a token", "engine_ms_a_token", ".2f"),
    ),
    "vanish": (
        Column("clients", "clients", "d"),
        Column("saw", saw),
        Column("requests left", "requests_left", ".0f"),
        Column("threads", "threads_more", "+d"),
        *MEMORY,
        Column("answers afterwards", "answers_afterwards"),
    ),
    "loads stop": (
        Column("clients", "clients", "d"),
        Column("loads stop after ms: p50", "loads_stop_p50_s", ".0f", 1e3),
        Column("p99", "loads_stop_p99_s", ".0f", 1e3),
        Column("worst", "loads_stop_worst_s", ".0f", 1e3),
    ),
    "fault": (
        Column("case", "case"),
        Column("clients", "clients", "d"),
        Column("saw", saw),
        Column("longest pause s", "longest_pause_s", ".2f"),
        Column("last end s", "last_end_s", ".1f"),
        Column("requests left", "requests_left", ".0f"),
        Column("exit code", "exit_code", "d"),
    ),
}


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("modes", nargs="*", help=f"{', '.join(MODES)} (all)")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each rate (%(default)s)")
    parser.add_argument("--seconds", type=float, help="of each rate, in place of --minutes")
    parser.add_argument("--shares", type=float, nargs="+", help="of the served rate (0.3 0.6 0.9 1.3; --quick: 0.6)")
    parser.add_argument("--at-once", type=positive, nargs="+", help="for the cost of HTTP (1 8 64; --quick: 1 8)")
    parser.add_argument("--clients", type=positive, help="that vanish (500; --quick: 40)")
    parser.add_argument("--alone", type=positive, help="of which the loads are timed (50; --quick: 8)")
    parser.add_argument("--cases", nargs="+", choices=faults.CASES, metavar="CASE", help="of faults (all)")
    parser.add_argument("--parallel", type=positive, default=64, help="answers at once (%(default)s)")
    parser.add_argument("--queue", type=int, default=64, help="of the server (%(default)s)")
    parser.add_argument("--shadow", default="none", help="its precision (%(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="of each node (%(default)s)")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds until an answer is stuck (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of whatever is drawn")
    parser.add_argument("--quick", action="store_true", help="every mode, short")
    args = parser.parse_args()
    if wrong := set(args.modes) - set(MODES):
        parser.error(f"{', '.join(wrong)} is no mode; allowed: {', '.join(MODES)}")
    args.modes = args.modes or list(MODES)
    args.shares = args.shares or ([0.6] if args.quick else [0.3, 0.6, 0.9, 1.3])
    args.at_once = args.at_once or ([1, 8] if args.quick else [1, 8, 64])
    args.clients = args.clients or (40 if args.quick else 500)
    args.alone = args.alone or (8 if args.quick else 50)
    args.cases = args.cases or list(faults.CASES)
    args.seconds = args.seconds or (20.0 if args.quick else None)
    return args


def main() -> int:
    args = parse()
    header("The HTTP service")
    rows: list[dict[str, Any]] = []
    for mode in args.modes:
        rows += {"load": load, "vanish": vanish, "faults": in_faults}[mode](args)
        for part, columns in TABLES.items():
            shown = [row for row in rows if row["part"] == part]
            if shown:
                print(f"\n{part}\n{text_table(columns, shown)}", flush=True)
    print(f"\n{save_rows('serve-quick' if args.quick else 'serve', rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
