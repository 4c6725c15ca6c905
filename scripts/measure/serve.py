"""The HTTP service from outside: load, the cost of HTTP, clients that vanish, faults while clients stream.

`load`: clients come by a Poisson process at shares of what a closed loop of --parallel clients is served, each streams
an answer, and every text is compared with the engine's own for the same prompt and seed; then more clients at once than
there are places. `cost`: the service and the engine alone, a process each on the same settings, take turns. `vanish`:
clients hang up at random points of their answers; when their loads stop stands in the engine's own record. `faults`:
32 clients stream from a local cluster while something happens; a table of what they saw, and those that came later.

    .venv/bin/python -m scripts.measure.serve --quick                  # a quarter of an hour
    .venv/bin/python -m scripts.measure.serve load --minutes 5
    .venv/bin/python -m scripts.measure.serve vanish --clients 500
    .venv/bin/python -m scripts.measure.serve faults --cases SIGTERM "killed worker"

Each mode writes serve-MODE.json. Exit code 1: a promise does not hold, and the last lines say which.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO, RESULTS
from scripts.lib.provenance import header, save_rows
from scripts.service import faults
from scripts.service.clients import questions
from scripts.service.cost import cost_rows
from scripts.service.engine import EngineAlone
from scripts.service.load import LoadTest
from scripts.service.promises import broken
from scripts.service.server import ServerFailed, ServerProcess
from scripts.service.tables import shown
from scripts.service.vanish import Vanishing

NAME = DEMO.name
COST_TOKENS = 48
Rows = list[dict[str, Any]]


def load(args: argparse.Namespace, rows: Rows) -> None:
    with _engine(args) as engine:
        right = engine.answers(questions())
    with _server(args) as server:
        test = LoadTest(server, NAME, right, args.parallel, args.queue, args.seed)
        _take(test.rows(args.shares, 60.0 * args.minutes, args.deadline), rows)


def cost(args: argparse.Namespace, rows: Rows) -> None:
    with _engine(args) as engine, _server(args) as server:
        _take(cost_rows(server, NAME, engine, args.at_once, COST_TOKENS, args.turns), rows)


def vanish(args: argparse.Namespace, rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "loads.jsonl"
        with _server(args, record) as server:
            test = Vanishing(server, NAME, record, args.parallel, args.parallel + args.queue, args.seed)
            _take(test.rows(args.clients, args.alone, args.deadline), rows)


def in_faults(args: argparse.Namespace, rows: Rows) -> None:
    with EngineAlone(shadow="none", threads=args.threads) as engine:
        right = engine.answers([question for some in faults.questions(args.tokens) for question in some])
    for case in args.cases:
        with ServerProcess(*_common(args), *faults.flags()) as server:
            _take(faults.rows(server, NAME, case, args.tokens, right, args.deadline), rows)


def _take(found: AsyncIterator[dict[str, Any]], rows: Rows) -> None:
    """Each row as it comes: a later failure leaves those before it."""

    async def take() -> None:
        async for row in found:
            rows.append(row)

    asyncio.run(take())


def _engine(args: argparse.Namespace) -> EngineAlone:
    return EngineAlone(shadow=args.shadow, threads=args.threads, parallel=args.parallel, queue=args.queue)


def _server(args: argparse.Namespace, record: Path | None = None) -> ServerProcess:
    places = ("--parallel", str(args.parallel), "--queue", str(args.queue))
    return ServerProcess("--shadow", args.shadow, *places, *_common(args), record=record)


def _common(args: argparse.Namespace) -> tuple[str, ...]:
    return ("--threads", str(args.threads), "--quiet", "--model-name", NAME)


MODES: dict[str, Callable[[argparse.Namespace, Rows], None]] = {
    "load": load,
    "cost": cost,
    "vanish": vanish,
    "faults": in_faults,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """`usual`, `quick`: the value where nobody says one. `modes`: for which it counts."""

    modes: tuple[str, ...]
    usual: Any
    quick: Any
    about: str
    kind: Callable[[str], Any]
    more: dict[str, Any] = field(default_factory=dict)
    """For argparse."""


SERVED = ("load", "cost", "vanish")
FLAGS = {
    "minutes": Flag(("load",), 5.0, 0.3, "of each rate", float),
    "shares": Flag(("load",), [0.1, 0.5, 0.9, 1.3], [0.6], "of the served rate", float, {"nargs": "+"}),
    "at-once": Flag(("cost",), [1, 8, 64], [1, 8], "requests", positive, {"nargs": "+"}),
    "turns": Flag(("cost",), 9, 3, "of service and engine", positive),
    "clients": Flag(("vanish",), 500, 40, "that hang up in mid-answer, among others", positive),
    "alone": Flag(("vanish",), 50, 8, "more of them, one after the other", positive),
    "cases": Flag(
        ("faults",), list(faults.CASES), list(faults.CASES), "all", str, {"nargs": "+", "choices": faults.CASES}
    ),
    "tokens": Flag(("faults",), 64, 24, "of each answer that streams", positive),
    "parallel": Flag(SERVED, 64, 64, "answers at once", positive),
    "queue": Flag(SERVED, 64, 64, "of the server", int),
    "shadow": Flag(SERVED, "none", "none", "its precision", str),
    "threads": Flag(tuple(MODES), 1, 1, "of each node", positive),
    "deadline": Flag(("load", "vanish", "faults"), 300.0, 300.0, "seconds until an answer is stuck", float),
    "seed": Flag(("load", "vanish"), 0, 0, "of whatever is drawn", int),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A flag that counts for none of the modes is an error."""
    parser = script_parser(__doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"{', '.join(MODES)} (all)")
    for name, flag in FLAGS.items():
        usual, quick = (" ".join(map(str, one)) if isinstance(one, list) else one for one in (flag.usual, flag.quick))
        values = f"{usual}" if usual == quick else f"{usual}; --quick: {quick}"
        about = f"{'/'.join(flag.modes)}: {flag.about} ({values})"
        parser.add_argument(f"--{name}", type=flag.kind, help=about, **flag.more)
    parser.add_argument("--quick", action="store_true", help="every mode, short")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory to write to (results/)")
    args = parser.parse_args(argv)
    if wrong := set(args.modes) - set(MODES):
        parser.error(f"{', '.join(sorted(wrong))} is no mode; allowed: {', '.join(MODES)}")
    args.modes = args.modes or list(MODES)
    for name, flag in FLAGS.items():
        field = name.replace("-", "_")
        if getattr(args, field) is None:
            setattr(args, field, flag.quick if args.quick else flag.usual)
        elif not set(flag.modes) & set(args.modes):
            parser.error(f"--{name} is for {', '.join(flag.modes)}; the modes are {', '.join(args.modes)}")
    return args


def main() -> int:
    args = parse()
    header("The HTTP service")
    found: list[str] = []
    for mode in args.modes:
        rows: Rows = []
        try:
            MODES[mode](args, rows)
        except (ServerFailed, RuntimeError, TimeoutError, OSError, psutil.Error, httpx2.HTTPError) as error:
            found.append(f"{mode} ended early: {type(error).__name__}: {error}")
        print(f"\n{shown(rows)}\n\n{save_rows(f'serve-{mode}' + '-quick' * args.quick, rows, args.out)}", flush=True)
        found += broken(rows)
    print("\n" + ("\n".join(f"BROKEN: {one}" for one in found) or "every promise holds"))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
