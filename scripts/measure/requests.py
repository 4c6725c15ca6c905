"""Tokens a second of several requests at once over those of one, where experts are read from the disk.

An embedded cluster of this machine as it is reads experts past the page cache (O_DIRECT). Answers of 1, 3 and 8
requests take turns in one cluster, each request in a thread of its own. Figures are those of the time in which all
requests decode: from the last one's first token to the first one's last token. Ratios are medians over the turns.

`demo-wide` is models/demo-moe with experts of 10.6 MB (scripts/models/widen.py), which answers GSM8K problems. `A` and
`B` are random with realistic widths and four layers (scripts/peers/checkpoints.py); random tokens are forced upon them,
since greedy answers of random models soon repeat themselves.

    .venv/bin/python -m scripts.measure.requests --quick
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import cache_dir, prepare_store
from scripts.lib.disk import disk_bytes
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.peers.checkpoints import SHAPES, VOCABULARY, make_checkpoint

LAYERS = 4
WIDER = 32
DEMO_WIDE = "demo-wide"
CASES: dict[str, dict[str, Any]] = {
    "od-moe": {"system": "od-moe", "shadow": "none"},
    "od-moe, nf4": {"system": "od-moe", "shadow": "nf4"},
    "od-moe, int8": {"system": "od-moe", "shadow": "int8"},
    "od-moe, int8, drafts": {"system": "od-moe", "shadow": "int8", "draft": "auto"},
    "od-moe, drafts from the prompt": {"system": "od-moe", "shadow": "none", "draft": 8, "draft_from": "prompt"},
    "od-moe, 2 slots": {"system": "od-moe", "shadow": "none", "slots": 2},
    "od-moe, dense parts batched": {"system": "od-moe", "shadow": "none", "batch_dense": True},
    "on-demand, 25 %": {"system": "on-demand", "residency": "lru", "workers": 1, "device_memory": "25%"},
    "importance, 25 %": {"system": "importance", "device_memory": "25%"},
    "hybrimoe, 25 %": {"system": "hybrimoe", "device_memory": "25%"},
    "lrfu-prefetch, 25 %": {"system": "lrfu-prefetch", "device_memory": "25%"},
}
QUICK_CASES = ("od-moe", "importance, 25 %")


@dataclass(slots=True)
class Moment:
    """When a token came, what had been read from disks by then, and the processor's seconds of all nodes."""

    at: float
    read: int
    cpu_s: float

    @classmethod
    def of(cls, at: float) -> Moment:
        return cls(at, disk_bytes(), time.process_time())


@dataclass(slots=True)
class Answered:
    """One request of a turn."""

    tokens: list[int]
    times: list[float]
    """Of each token."""
    first: Moment
    last: Moment
    report: Any


class Forced:
    """Takes the place of an answer's chooser: chooses the text's next token."""

    def __init__(self, text: list[int]) -> None:
        self.ignored: list[str] = []
        self.seed: int | None = None
        self.ends: frozenset[int] = frozenset()
        self.complete_at: int | None = None
        self._text = iter(text)

    def choose(self, logits: Any) -> int:
        return next(self._text)


def ask(cluster: Any, prompt: list[int], tokens: int, text: list[int] | None) -> Answered:
    """`text`: tokens that are forced."""
    answer = cluster.generate(prompt, tokens, ignore_eos=True)
    if text is not None:
        answer.request.chooser = Forced(text)
    times: list[float] = []
    found: list[int] = []
    for step in answer:
        if step.token_id is None:
            break
        times.append(time.monotonic())
        found.append(step.token_id)
        if len(times) == 1:
            first = Moment.of(times[-1])
        if step.finish:
            last = Moment.of(times[-1])
    return Answered(found, times, first, last, step.report)


def figures(answers: list[Answered]) -> dict[str, float]:
    """Of the time in which all of them decode."""
    begin = max((one.first for one in answers), key=lambda moment: moment.at)
    end = min((one.last for one in answers), key=lambda moment: moment.at)
    tokens = sum(begin.at < at <= end.at for one in answers for at in one.times)
    gaps = sorted(b - a for one in answers for a, b in zip(one.times, one.times[1:], strict=False) if a >= begin.at)
    reports = [one.report for one in answers]
    decoded = sum(one.new_tokens - 1 for one in reports)
    return {
        "tokens_per_s": tokens / (end.at - begin.at),
        "bytes_a_token": (end.read - begin.read) / tokens,
        "cpu_s_a_token": (end.cpu_s - begin.cpu_s) / tokens,
        "loads_a_token": sum(one.loads - one.prefill_loads for one in reports) / decoded,
        "hit_rate": sum(one.hits for one in reports) / max(1, sum(one.named for one in reports)),
        "stall_s_a_token": sum(one.stall_s for one in reports) / decoded,
        "gap_s": statistics.median(gaps),
        "longest_gap_s": gaps[-1],
        "ttft_s": statistics.median(one.ttft_s for one in reports),
    }


class Bench:
    """One model and its prompts."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self._args = name, args
        path = demo_wide(args.folder) if name == DEMO_WIDE else random_model(name, args.folder)
        self.store = prepare_store(str(path), None, "bfloat16")
        most = max(args.requests)
        self.texts: list[list[int] | None] = [None] * most
        if name == DEMO_WIDE:
            from odmoe.text import load_tokenizer
            from scripts.lib.prompts import prompts_of_length

            self.prompts = prompts_of_length(load_tokenizer(self.store.dense), most, args.prompt_tokens)
        else:
            import torch

            size = (most, args.prompt_tokens + args.tokens)
            drawn = torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(0)).tolist()
            self.prompts = [one[: args.prompt_tokens] for one in drawn]
            self.texts = [one[args.prompt_tokens :] for one in drawn]

    def rows(self, case: str) -> Iterator[dict[str, Any]]:
        """A row for each number of requests."""
        args = self._args
        common = {"model": str(self.store.dense), "loader": "disk", "threads": args.threads}
        settings = Settings(**common, parallel=max(args.requests), **CASES[case])
        found: dict[int, list[dict[str, float]]] = {count: [] for count in args.requests}
        tokens: dict[int, set[tuple[int, ...]]] = {number: set() for number in range(len(self.prompts))}
        cluster = start_cluster(settings, self.store)
        try:
            exact = True
            for turn in range(args.turns + 1):
                for count in args.requests if turn % 2 else reversed(args.requests):
                    numbers = [(turn + place) % len(self.prompts) for place in range(count)]
                    answers = self._at_once(cluster, numbers)
                    exact = all(one.report.exact for one in answers)
                    for number, one in zip(numbers, answers, strict=True):
                        tokens[number].add(tuple(one.tokens))
                    if turn:  # the first one warms up
                        found[count].append(figures(answers))
        finally:
            cluster.close()
        for count, of in found.items():
            ratios = [mine["tokens_per_s"] / one["tokens_per_s"] for mine, one in zip(of, found[1], strict=True)]
            medians = {name: statistics.median(each[name] for each in of) for name in of[0]}
            facts = {"model": self.name, "case": case, "requests": count, "exact": exact}
            same = None if any(self.texts) else all(len(each) <= 1 for each in tokens.values())
            yield facts | medians | {"over_one": statistics.median(ratios), "ratios": ratios, "same_tokens": same}

    def _at_once(self, cluster: Any, numbers: list[int]) -> list[Answered]:
        with ThreadPoolExecutor(len(numbers)) as pool:
            asked = [pool.submit(ask, cluster, self.prompts[n], self._args.tokens, self.texts[n]) for n in numbers]
            return [one.result() for one in asked]


def demo_wide(folder: Path) -> Path:
    """models/demo-moe with larger experts, made unless it is there."""
    from transformers import AutoModelForCausalLM

    from scripts.lib.widened import widened

    path = folder / f"{DEMO_WIDE}-{WIDER}"
    if not path.is_dir():
        partial = folder / f".{path.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        widened(AutoModelForCausalLM.from_pretrained(DEMO, dtype="auto"), WIDER).save_pretrained(partial)
        for file in sorted([*DEMO.glob("token*"), *DEMO.glob("special*")]):
            shutil.copy(file, partial)
        partial.rename(path)
    return path


def random_model(name: str, folder: Path) -> Path:
    return make_checkpoint(replace(SHAPES[name], name=f"{name}-{LAYERS}", layers=LAYERS), folder)


COLUMNS = (
    Column("model", "model"),
    Column("case", "case"),
    Column("requests", "requests", "d"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("over one", "over_one", ".2f"),
    Column("loads a token", "loads_a_token", ".2f"),
    Column("MB a token", "bytes_a_token", ".1f", 1e-6),
    Column("processor ms a token", "cpu_s_a_token", ".0f", 1e3),
    Column("hit rate", "hit_rate", ".2f"),
    Column("gap ms", "gap_s", ".0f", 1e3),
    Column("longest gap ms", "longest_gap_s", ".0f", 1e3),
    Column("exact", "exact"),
    Column("same tokens", "same_tokens"),  # if none are forced
)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    names = [DEMO_WIDE, *SHAPES]
    parser.add_argument("--models", nargs="+", choices=names, help=f"({' '.join(names)}; --quick: {DEMO_WIDE})")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help="(all; --quick: two)")
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 3, 8], help="at once (1 3 8)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="of each prompt (%(default)s)")
    parser.add_argument("--tokens", type=positive, help="of each answer (24; --quick: 8)")
    parser.add_argument("--turns", type=positive, help="measured (3; --quick: 1)")
    parser.add_argument("--threads", type=positive, default=1, help="of each node (%(default)s)")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "requests", help="for checkpoints (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one model, two cases, one turn")
    args = parser.parse_args()
    if 1 not in args.requests:
        parser.error(f"--requests is {args.requests}; 1 must be among them: ratios are those to one request")
    args.models = args.models or ([DEMO_WIDE] if args.quick else names)
    args.cases = args.cases or list(QUICK_CASES if args.quick else CASES)
    args.tokens = args.tokens or (8 if args.quick else 24)
    args.turns = args.turns or (1 if args.quick else 3)
    return args


def main() -> int:
    args = parse()
    prepare_process()
    prepare_libraries(args.threads)
    header("Several requests at once, experts on the disk")
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        bench = Bench(name, args)
        for case in args.cases:
            print(f"{name}: {case}", file=sys.stderr, flush=True)
            rows += bench.rows(case)
    print(text_table(COLUMNS, rows))
    print(f"\n{save_rows('requests', rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
