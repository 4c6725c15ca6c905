"""What the checks cost in decoding: each of them, and all together, in turns in one run.

A check is switched off by a function in its place that does nothing. Within the same answers of one cluster, a few
tokens are decoded with all checks, as many with none, and, unless --together, as many without each of them, in an order
that is drawn anew for each round. A ratio is that of two times of one round; figures are medians over the rounds, with
the bounds between which the median lies with 95 % probability.

    .venv/bin/python -m scripts.measure.checks --quick
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odmoe.clusters import embedded
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import cache_dir, prepare_store
from odmoe.text import encode, load_tokenizer
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.measure.requests import demo_wide
from wire.base import Channel, Handler, Node
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer

ALL, NONE = "all", "none"


Function = tuple[str, str, Callable[..., Any]]
"""(module, name in it, what to call in its place)."""


def _nothing(*args: Any, **named: Any) -> None:
    """In place of a check that raises, or finds a fault."""


def _no(*args: Any, **named: Any) -> bool:
    """In place of the question whether to check."""
    return False


def _fine(*args: Any, **named: Any) -> bool:
    """In place of a check that answers."""
    return True


def _no_checksum(*tensors: Any) -> int:
    """In place of a checksum: none was made, so that none is compared."""
    return 0


CHECKS: dict[str, tuple[Function, ...]] = {
    "loads": (
        ("worker_node.loaders.load_checks", "LoadChecks._due", _no),
        ("worker_node.loaders.load_checks", "LoadChecks._changed", _nothing),
    ),
    "audits": (("main_node.checks.audits", "Audits.wants", _no),),
    "bounds": (("wire.bounds.check", "Bounds.check", _nothing),),
    "checksums of rows": (
        ("main_node.engine.layer", "tensor_checksum", _no_checksum),
        ("worker_node.session", "tensor_checksum", _no_checksum),
    ),
    "finite numbers": (
        ("main_node.engine.output_checks", "is_finite", _fine),
        ("main_node.choosing.chooser", "is_finite", _fine),
    ),
}
CASES: dict[str, dict[str, Any]] = {
    "memory": {"loader": "memory", "shadow": "none"},
    "disk": {"loader": "disk", "shadow": "none"},
    "disk, wide": {"loader": "disk", "shadow": "none", "wide": True},
    "memory, gRPC": {"loader": "memory", "shadow": "none", "wired": True},
    "emulated": {"loader": "memory", "shadow": "int8", "profile": "rtx3090-1gbe"},
}
"""Of models/demo-moe: experts of 332 KB, the smallest there are, and `wide` ones of 10.6 MB. `wired`: messages travel
over gRPC on loopback."""


def known() -> dict[str, tuple[Function, ...]]:
    """The checks that this version has."""
    return {name: functions for name, functions in CHECKS.items() if all(map(_is_there, functions))}


def _is_there(function: Function) -> bool:
    try:
        return callable(_found(*function[:2])[2])
    except (ImportError, AttributeError):
        return False


def _found(module: str, name: str) -> tuple[Any, str, Any]:
    """(what holds it, its last name, the function)."""
    owner: Any = importlib.import_module(module)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, last, getattr(owner, last)


@contextlib.contextmanager
def switched_off(functions: Iterable[Function]) -> Iterator[None]:
    before = []
    try:
        for module, name, other in functions:
            owner, last, function = _found(module, name)
            before.append((owner, last, function))
            setattr(owner, last, other)
        yield
    finally:
        for owner, last, function in reversed(before):
            setattr(owner, last, function)


@contextlib.contextmanager
def wired() -> Iterator[None]:
    """Nodes of an embedded cluster are connected over gRPC."""
    servers: list[GrpcServer] = []
    inside = embedded._to

    def to(node: Node) -> Callable[[Handler], Channel]:
        servers.append(GrpcServer(node, "worker"))
        return lambda handler: connect(servers[-1].address, "worker", handler)

    embedded._to = to
    try:
        yield
    finally:
        embedded._to = inside
        for server in servers:
            server.close()


@dataclass(slots=True)
class Round:
    """Seconds of a few tokens by variant, and the processor's seconds of all nodes together."""

    seconds: dict[str, float]
    cpu_s: dict[str, float]


class Decoding:
    """Answers of one cluster, one after the other: a token at a time, without prefill."""

    def __init__(self, cluster: Any, ids: list[int], tokens: int) -> None:
        self._cluster, self._ids, self._tokens = cluster, ids, tokens
        self._steps: Iterator[Any] = iter(())
        self._left = 0
        self._answer: list[int] = []
        self.answers: set[tuple[int, ...]] = set()
        """Different ones."""

    def run(self, count: int) -> None:
        """Decode so many tokens; they are all in one answer."""
        if self._left < count:
            self.end()
            self._steps = self._cluster.generate(self._ids, self._tokens + 1, ignore_eos=True)
            self._answer, self._left = [next(self._steps).token_id], self._tokens
        for _ in range(count):
            self._answer.append(next(self._steps).token_id)
        self._left -= count

    def end(self) -> Any:
        """Decode the rest of the answer. Returns its last step, None if there was no answer."""
        last = None
        for last in self._steps:
            if last.token_id is not None:
                self._answer.append(last.token_id)
        if self._answer:
            self.answers.add(tuple(self._answer))
        self._left = 0
        return last


def rows(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for all checks together, and one for each."""
    setting = dict(CASES[case])
    wide, over_grpc = setting.pop("wide", False), setting.pop("wired", False)
    path = demo_wide(args.folder) if wide else DEMO
    store = prepare_store(str(path), None, "bfloat16")
    common = {"model": str(store.dense), "threads": args.threads, "dtype": "bfloat16", "workers": args.workers}
    ids = encode(load_tokenizer(store.dense), gsm8k_prompts(1)[0], 1 << 30)
    checks = known()
    each = {} if args.together else checks
    every = tuple(function for functions in checks.values() for function in functions)
    with wired() if over_grpc else contextlib.nullcontext():
        cluster = start_cluster(Settings(**common, **setting), store)
        try:
            decoding = Decoding(cluster, ids, args.tokens)
            found = [*rounds(decoding, {ALL: (), NONE: every, **each}, args)]
            decoding.end()
        finally:
            cluster.close()
    facts = {"case": case, "answers": len(decoding.answers), "rounds": len(found)}
    return [
        facts | {"check": "all of them" if name == NONE else name} | costs(found, name, args.block)
        for name in (NONE, *each)
    ]


def rounds(decoding: Decoding, variants: dict[str, tuple[Function, ...]], args: argparse.Namespace) -> Iterator[Round]:
    draw = random.Random(0)
    end = time.monotonic() + args.seconds
    decoding.run(args.tokens)  # warms up
    while time.monotonic() < end:
        found = Round({}, {})
        for name in draw.sample(list(variants), len(variants)):
            with switched_off(variants[name]):
                cpu_s, start = time.process_time(), time.perf_counter()
                decoding.run(args.block)
                found.seconds[name] = time.perf_counter() - start
                found.cpu_s[name] = time.process_time() - cpu_s
        yield found


def costs(found: list[Round], without: str, tokens: int) -> dict[str, Any]:
    """How much longer tokens take with the checks than without, as shares of the latter."""
    longer = sorted(one.seconds[ALL] / one.seconds[without] - 1 for one in found)
    busier = sorted(one.cpu_s[ALL] / one.cpu_s[without] - 1 for one in found)
    rate = tokens / statistics.median(one.seconds[ALL] for one in found)
    low, high = median_bounds(longer)
    return {
        "rate": rate,
        "cost": statistics.median(longer),
        "low": low,
        "high": high,
        "cpu": statistics.median(busier),
        "cpu_low": median_bounds(busier)[0],
        "cpu_high": median_bounds(busier)[1],
    }


def median_bounds(values: list[float]) -> tuple[float, float]:
    """Between which the median of their distribution lies with 95 % probability. `values`: ascending."""
    reach = 0.98 * math.sqrt(len(values))
    middle = (len(values) - 1) / 2
    return values[max(0, math.floor(middle - reach))], values[min(len(values) - 1, math.ceil(middle + reach))]


COLUMNS = (
    Column("case", "case"),
    Column("check", "check"),
    Column("tokens/s", "rate", ".1f"),
    Column("cost", "cost", "+.2%"),
    Column("from", "low", "+.2%"),
    Column("to", "high", "+.2%"),
    Column("processor", "cpu", "+.2%"),
    Column("from", "cpu_low", "+.2%"),
    Column("to", "cpu_high", "+.2%"),
    Column("rounds", "rounds", "d"),
    Column("answers", "answers", "d"),
)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"({', '.join(CASES)})")
    parser.add_argument("--tokens", type=positive, default=56, help="of each answer (%(default)s)")
    parser.add_argument("--block", type=positive, default=4, help="tokens between two switches (%(default)s)")
    parser.add_argument("--seconds", type=positive, help="of each case (180; --quick: 20)")
    parser.add_argument("--together", action="store_true", help="only all of them beside none: more rounds")
    parser.add_argument("--workers", type=positive, default=8, help="(%(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="of each node (%(default)s)")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "requests", help="for checkpoints (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a third of a minute for each case")
    args = parser.parse_args()
    args.cases = args.cases or list(CASES)
    args.seconds = args.seconds or (20 if args.quick else 180)
    if args.tokens < args.block:
        parser.error(f"--block is {args.block}; allowed: 1 to --tokens ({args.tokens})")
    return args


def main() -> int:
    args = parse()
    prepare_process()
    prepare_libraries(args.threads)
    header("Cost of checks in decoding")
    missing = CHECKS.keys() - known().keys()
    if missing:
        print(f"not in this version: {', '.join(sorted(missing))}", file=sys.stderr)
    args.folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for case in args.cases:
        print(case, file=sys.stderr, flush=True)
        found += rows(case, args)
    print(text_table(COLUMNS, found))
    print(f"\n{save_rows('checks', found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
