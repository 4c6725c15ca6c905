"""The first token of a conversation's fifth turn over that of a first reading, and the bytes that prefill loads.

Five turns of random tokens, 1,500 in the last, of which 60 are new; answers count 20. The prefix cache finds whole
blocks, so how much is read again depends on where the turns end: several conversations end at different places.
`first reading`: of the same fifth turn, with the prefix cache on and nothing in it. `without`: the prefix cache is off.
`restarted`: the node ended after the fourth turn, and found it with --kv-disk. All in one run, and the conversations of
the kinds take turns. A quarter of the experts is in memory, and experts are read from the disk past the page cache.
Processor time is that of all nodes and of loads; other programs on the machine hardly change it.

The model is random, with Qwen3-MoE's architecture (scripts/peers/checkpoints.py).

    .venv/bin/python -m scripts.measure.conversation --quick
    .venv/bin/python -m scripts.measure.conversation --quick --wide --device-memory 100%
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import cache_dir, prepare_store
from scripts.lib.flags import positive, script_parser
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.peers.checkpoints import VOCABULARY, Shape, make_checkpoint

SHAPE = Shape("conversation", "qwen3_moe", layers=2, experts=16, top_k=2, inner=256, hidden=512, heads=4, key_heads=2)
WIDE = Shape("conversation-wide", "qwen3_moe", layers=2, experts=32, top_k=2, inner=768, hidden=2048)
"""Experts and hidden states of Qwen3-30B-A3B."""
TURNS = (500, 300, 300, 260, 60)
"""New tokens of each turn."""
ANSWER = 20
"""Tokens of each answer, which the next turn repeats."""
LONG = 2000
SYSTEM = {"residency": "lru", "workers": 1}


class Asked(NamedTuple):
    report: Any
    processor_s: float


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.store = prepare_store(str(make_checkpoint(WIDE if args.wide else SHAPE, args.folder)), None, "bfloat16")
        self._kept = args.folder / f"kv-{Path(tempfile.mkdtemp(dir=args.folder)).name}"
        self._drawn = 0

    def conversation(self, shift: int) -> list[list[int]]:
        """The prompt of each turn. `shift`: so many tokens more in the first."""
        import torch

        self._drawn += 1
        generator = torch.Generator().manual_seed(self._drawn)
        tokens = torch.randint(VOCABULARY, (sum(TURNS) + ANSWER * 4 + shift,), generator=generator).tolist()
        ends, at = [], shift - ANSWER
        for new in TURNS:
            at += ANSWER + new
            ends.append(at)
        return [tokens[:end] for end in ends]

    def cluster(self, **more: Any) -> Any:
        common: dict[str, Any] = {"model": str(self.store.dense), "loader": "disk", "threads": self._args.threads}
        common |= SYSTEM | {"device_memory": self._args.device_memory, "shadow": self._args.shadow}
        common["system"] = "on-demand" if self._args.shadow == "none" else "od-moe"
        cluster = start_cluster(Settings(**common, **more), self.store)
        self.ask(cluster, self.conversation(0)[-1])  # warms up, and finds out what rows may share
        return cluster

    def ask(self, cluster: Any, prompt: list[int]) -> Asked:
        began = time.process_time()
        tokens = 1 if self._args.shadow == "none" else 2  # for the second one, the shadow has read the prompt
        *_, last = cluster.generate(prompt, tokens, ignore_eos=True)
        return Asked(last.report, time.process_time() - began)

    def rows(self) -> Iterator[dict[str, Any]]:
        memory, disk = {"kv_memory": "2GB"}, {"kv_memory": "2GB", "kv_disk": str(self._kept)}
        with closing(self.cluster()) as off, closing(self.cluster(**memory)) as on:
            plain, cold, warm = [], [], []
            for shift in self._args.shifts:
                plain.append(self.ask(off, self.conversation(shift)[-1]))
                cold.append(self.ask(on, self.conversation(shift)[-1]))
                warm.append([self.ask(on, prompt) for prompt in self.conversation(shift)])
        talks = [self.conversation(shift) for shift in self._args.shifts]
        with closing(self.cluster(**disk)) as before:
            for prompts in talks:
                for prompt in prompts[:-1]:
                    self.ask(before, prompt)
        with closing(self.cluster(**disk)) as after:
            restarted = [self.ask(after, prompts[-1]) for prompts in talks]
        for number, shift in enumerate(self._args.shifts):
            first = cold[number]
            for kind, (report, processor_s) in (
                ("without", plain[number]),
                ("first reading", cold[number]),
                ("fifth turn", warm[number][-1]),
                ("restarted", restarted[number]),
            ):
                yield {
                    "shift": shift,
                    "kind": kind,
                    "prompt": report.prompt_tokens,
                    "read": report.prompt_tokens - report.cached_tokens,
                    "ttft_s": report.ttft_s,
                    "ratio": report.ttft_s / first.report.ttft_s,
                    "processor_s": processor_s,
                    "processor_ratio": processor_s / first.processor_s,
                    "loaded": report.bytes_loaded / self.store.manifest.expert_bytes,
                    "turns": [one.report.ttft_s for one in warm[number]] if kind == "fifth turn" else None,
                }

    def prefill(self) -> Iterator[dict[str, Any]]:
        """Of 2,000 tokens: blocks that share a pass, each block in a pass of its own, and without the prefix cache."""
        import torch

        prompt = torch.randint(VOCABULARY, (LONG,), generator=torch.Generator().manual_seed(99)).tolist()
        kinds: dict[str, dict[str, Any]] = {
            "without": {},
            "blocks together": {"kv_memory": "2GB"},
            "512 together": {"kv_memory": "2GB", "mini_batch": 512},
        }
        for kind, more in kinds.items():
            with closing(self.cluster(**more)) as cluster:
                report, _ = self.ask(cluster, prompt)
            loaded = report.bytes_loaded / self.store.manifest.expert_bytes
            passes = report.prefill_passes
            row = {"kind": kind, "prompt": LONG, "ttft_s": report.ttft_s, "loaded": loaded, "passes": passes}
            yield row | {"loaded_a_pass": loaded / passes}

    def close(self) -> None:
        shutil.rmtree(self._kept, ignore_errors=True)


COLUMNS = (
    Column("shift", "shift", "d"),
    Column("kind", "kind"),
    Column("prompt", "prompt", "d"),
    Column("tokens read", "read", "d"),
    Column("first token s", "ttft_s", ".3f"),
    Column("over first reading", "ratio", ".3f"),
    Column("processor s", "processor_s", ".3f"),
    Column("over first reading", "processor_ratio", ".3f"),
    Column("bytes over experts'", "loaded", ".2f"),
)
PREFILL = (
    Column("prefill", "kind"),
    Column("prompt", "prompt", "d"),
    Column("passes", "passes", "d"),
    Column("first token s", "ttft_s", ".3f"),
    Column("bytes over experts'", "loaded", ".2f"),
    Column("a pass", "loaded_a_pass", ".2f"),
)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--threads", type=positive, default=1, help="of each node (%(default)s)")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "conversation", help="(%(default)s)")
    parser.add_argument("--wide", action="store_true", help="a model of a published model's width")
    parser.add_argument("--device-memory", default="25%", help="of experts")
    parser.add_argument("--shadow", default="none", help="none, or a shadow's scheme such as int8: od-moe with a cache")
    parser.add_argument("--quick", action="store_true", help="one conversation")
    args = parser.parse_args()
    args.shifts = [0] if args.quick else [0, 32, 64, 96]
    return args


def main() -> int:
    args = parse()
    prepare_process()
    prepare_libraries(args.threads)
    header("A conversation's fifth turn")
    args.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    try:
        rows = list(bench.rows())
        print(text_table(COLUMNS, rows))
        for kind in ("without", "fifth turn", "restarted"):
            found = [[row[name] for row in rows if row["kind"] == kind] for name in ("ratio", "processor_ratio")]
            median, processor = map(statistics.median, found)
            print(f"{kind} over first reading: median {median:.3f}, in processor time {processor:.3f}")
        loads = list(bench.prefill())
        print(text_table(PREFILL, loads))
    finally:
        bench.close()
    print(f"\nraw data: {save_rows('conversation', rows + loads)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
