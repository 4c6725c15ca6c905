"""Published formats at full width: what sharding takes, and what answers from the disk cost, native and dequantised.

The checkpoints are random and have few layers (scripts/checkpoints). Sharding is `odmoe shard` in a process of its own,
whose anonymous memory is looked at every 5 ms; beside it stands the peak of sharding models/demo-moe, which is that of
the program itself. Answers come from embedded clusters in processes of their own, a cluster for each store, asked in
turns for the same forced tokens. Workers read experts past the page cache (O_DIRECT). A further turn of each is sampled
by py-spy, which tells how much of the busy time restores experts.

    .venv/bin/python -m scripts.measure.formats.published --models qwen3-30b-a3b
    .venv/bin/python -m scripts.measure.formats.published --models deepseek-v3 --experts 32 --vocabulary 32768

The checkpoint is removed before the answers, the stores are removed at the end, unless --keep is given. Sharding
gpt-oss-20b with 6 layers twice needs 22 GB, qwen3-30b-a3b 17 GB.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.manifest import DENSE
from checkpoint.store import ExpertStore
from odmoe.stores import cache_dir
from scripts.checkpoints.make import make
from scripts.checkpoints.models import MODELS
from scripts.checkpoints.weights import BF16
from scripts.lib.disk import drop_pages
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO, ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.lib.timing.intervals import Interval
from scripts.peers.engine_process import EngineProcess
from scripts.peers.engines import OURS, Engine, Task, Turn
from scripts.processes.memory import AnonymousPeak
from scripts.processes.samples import RESTORING, share_of

NATIVE, DEQUANTISED, PLAIN = "native", "dequantised", "plain"
"""How a store keeps experts. `PLAIN`: the checkpoint has no format of its own."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "od-moe": {"system": "od-moe", "shadow": "none", "workers": 8},
    "cached": {"system": "lrfu-prefetch", "workers": 1},
}
SHARD_S = 3600.0


@dataclass(frozen=True, slots=True)
class Sharded:
    """One run of `odmoe shard`."""

    seconds: float
    cpu_s: float
    peak_bytes: int
    """Of anonymous memory."""


def shard(checkpoint: Path, store: Path, kind: str) -> Sharded:
    """Read from the disk, not from the page cache. Raises CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m", "odmoe", "shard", str(checkpoint), str(store), "--quiet"]
    command += [] if kind == PLAIN else ["--experts", kind]
    drop_pages([checkpoint])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process, AnonymousPeak(process.pid) as peak:
        try:
            code = process.wait(SHARD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise subprocess.CalledProcessError(code, command)
    return Sharded(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak.bytes)


def shard_demo(folder: Path) -> Sharded:
    """What the program takes for a model of 0.6 MB a layer."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return shard(DEMO, Path(place) / "store", PLAIN)


def shard_row(model: str, kind: str, store: ExpertStore, checkpoint: Path, found: Sharded, own: int) -> dict[str, Any]:
    """`own`: the peak of the program itself."""
    manifest = store.manifest
    layer = max(sum(blob.length for blob in spec.blobs) for spec in manifest.layers.values())
    return {
        "model": model,
        "experts": kind,
        "layers": len(manifest.layers),
        "of_a_layer": len(next(iter(manifest.layers.values())).blobs),
        "expert_bytes": manifest.blob_bytes,
        "layer_bytes": layer,
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
        "store_bytes": sum(file.stat().st_size for file in store.path.rglob("*") if file.is_file()),
        "seconds": found.seconds,
        "cpu_s": found.cpu_s,
        "peak_bytes": found.peak_bytes,
        "own_bytes": own,
        "peak_over_layer": found.peak_bytes / layer,
        "added_over_layer": (found.peak_bytes - own) / layer,
    }


def task(seed: int, turn: int, vocabulary: int, prompt: int, tokens: int) -> Task:
    draw = random.Random(f"{seed}/{turn}")
    ids = [draw.randrange(vocabulary) for _ in range(prompt + tokens)]
    return Task(ids[:prompt], ids[prompt:])


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Answers:
    """The clusters of one model and system, a store each."""

    def __init__(self, stores: dict[str, Path], system: str, args: argparse.Namespace) -> None:
        self._args = args
        settings = SYSTEMS[system] | ({"device_memory": args.device_memory} if system == "cached" else {})
        self._processes: dict[str, EngineProcess] = {}
        self._cpu_s: dict[str, list[float]] = {kind: [] for kind in stores}
        for kind, store in stores.items():
            self._vocabulary = ExpertStore.open(store).manifest.config["vocab_size"]
            drop_pages([store])
            self._processes[kind] = EngineProcess(Engine(OURS, store, args.threads, None, settings))
            self._processes[kind].answer(self._task(-1, 1))

    def _task(self, turn: int, tokens: int) -> Task:
        return task(0, turn, self._vocabulary, self._args.prompt_tokens, tokens)

    def rows(self) -> list[dict[str, Any]]:
        """Of each store, in alternated turns."""
        turns: dict[str, list[Turn]] = {kind: [] for kind in self._processes}
        for turn in range(self._args.turns):
            for kind in sorted(self._processes, reverse=turn % 2 == 1):
                process = self._processes[kind]
                before = cpu_s(process.pid)
                turns[kind].append(process.answer(self._task(turn, self._args.tokens)))
                self._cpu_s[kind].append(cpu_s(process.pid) - before)
                print(
                    f"{kind}: {turns[kind][-1].decode_s / self._args.tokens:.3f} s a token", file=sys.stderr, flush=True
                )
        choices = {kind: [one.choices for one in each] for kind, each in turns.items()}
        same = len({json.dumps(each) for each in choices.values()}) == 1 if len(choices) > 1 else None
        beside = turns.get(DEQUANTISED)
        return [self._row(kind, each, None if kind == DEQUANTISED else beside, same) for kind, each in turns.items()]

    def _row(self, kind: str, turns: list[Turn], beside: list[Turn] | None, same: bool | None) -> dict[str, Any]:
        process, tokens = self._processes[kind], self._args.tokens
        ratios = [other.decode_s / one.decode_s for one, other in zip(turns, beside, strict=True)] if beside else None
        median = statistics.median
        return {
            "experts": kind,
            "start_s": process.start_s,
            "ttft_s": median(one.ttft_s for one in turns),
            "tokens_per_s": tokens / median(one.decode_s for one in turns),
            "bytes_a_token": median(one.read_bytes for one in turns) / tokens,
            "bytes_per_s": median(one.read_bytes / one.decode_s for one in turns),
            "cpu_s_a_token": median(self._cpu_s[kind]) / (tokens + 1),  # the prompt is a pass, too
            "hit_rate": median((one.hits or 0) / max(1, one.named or 0) for one in turns),
            "over_dequantised": median(ratios) if ratios else None,
            "ratios": ratios,
            "peak_bytes": process.peak_bytes(),
            "exact": all(one.exact for one in turns),
            "same_choices": same,
            "restoring": share_of(process.pid, lambda: process.answer(self._task(self._args.turns, tokens)), RESTORING),
        }

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def measure(name: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of sharding and of answering."""
    began = time.monotonic()
    checkpoint = make(MODELS[name], args.folder, args.layers, args.experts, args.vocabulary)
    print(f"{checkpoint}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    kinds = [PLAIN] if MODELS[name].encoding == BF16 else args.kinds
    stores = {kind: checkpoint.with_name(f"{checkpoint.name}.{kind}") for kind in kinds}
    try:
        own = shard_demo(args.folder).peak_bytes
        sharding = []
        for kind, place in stores.items():
            shutil.rmtree(place, ignore_errors=True)
            found = shard(checkpoint, place, kind)
            sharding.append(shard_row(name, kind, ExpertStore.open(place), checkpoint, found, own))
            print(text_table(SHARDING, sharding[-1:]), file=sys.stderr, flush=True)
        dense = {file.name: file for file in ((stores[kinds[0]] / DENSE).iterdir())}
        for place in list(stores.values())[1:]:
            share_files(dense, place / DENSE)
        if not args.keep:
            shutil.rmtree(checkpoint)
        answering = []
        for system in args.systems:
            answers = Answers(stores, system, args)
            try:
                answering += [{"model": name, "system": system} | row for row in answers.rows()]
            finally:
                answers.close()
        return sharding, answering
    finally:
        for place in [] if args.keep else [checkpoint, *stores.values()]:
            shutil.rmtree(place, ignore_errors=True)


def share_files(files: dict[str, Path], folder: Path) -> None:
    """Files of the same name and bytes in `folder` become links to these: the dense part takes its room once."""
    for name, file in files.items():
        other = folder / name
        if other.is_file() and filecmp.cmp(file, other, shallow=False):
            other.unlink()
            other.hardlink_to(file)


SHARDING = (
    Column("model", "model"),
    Column("experts", "experts"),
    Column("layers", "layers", "d"),
    Column("experts a layer", "of_a_layer", "d"),
    Column("MB an expert", "expert_bytes", ".1f", 1e-6),
    Column("GB a layer", "layer_bytes", ".2f", 1e-9),
    Column("GB read", "checkpoint_bytes", ".1f", 1e-9),
    Column("GB written", "store_bytes", ".1f", 1e-9),
    Column("s", "seconds", ".0f"),
    Column("processor s", "cpu_s", ".0f"),
    Column("peak GB", "peak_bytes", ".2f", 1e-9),
    Column("the program's own", "own_bytes", ".2f", 1e-9),
    Column("peak over a layer", "peak_over_layer", ".2f"),
    Column("less its own", "added_over_layer", ".2f"),
)
ANSWERING = (
    Column("model", "model"),
    Column("system", "system"),
    Column("experts", "experts"),
    Column("start to first token s", "start_s", ".0f"),
    Column("ttft s", "ttft_s", ".1f"),
    Column("tokens/s", "tokens_per_s", ".3f"),
    Column("over dequantised", lambda row: None if row["ratios"] is None else str(Interval.of(row["ratios"]))),
    Column("MB a token", "bytes_a_token", ".0f", 1e-6),
    Column("MB/s", "bytes_per_s", ".0f", 1e-6),
    Column("processor s a token", "cpu_s_a_token", ".2f"),
    Column("hit rate", "hit_rate", ".2f"),
    Column("restoring", "restoring", ".2f"),
    Column("peak GB", "peak_bytes", ".2f", 1e-9),
    Column("exact", "exact"),
    Column("same choices", "same_choices"),
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(all)")
    parser.add_argument("--kinds", nargs="+", choices=(NATIVE, DEQUANTISED), default=[NATIVE, DEQUANTISED])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["od-moe"], help="(od-moe)")
    parser.add_argument("--device-memory", default="25%", help="of the system `cached` (%(default)s)")
    parser.add_argument("--layers", type=positive, help="MoE layers (6; deepseek-v3: 2)")
    parser.add_argument("--experts", type=positive, help="of a layer (as published)")
    parser.add_argument("--vocabulary", type=positive, help="tokens (as published)")
    parser.add_argument("--prompt-tokens", type=positive, default=4, help="of each prompt (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=12, help="decoded in a turn (%(default)s)")
    parser.add_argument("--turns", type=positive, default=3, help="measured (%(default)s)")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "published", help="(%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave checkpoint and stores")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    header("Published formats at full width")
    args.folder.mkdir(parents=True, exist_ok=True)
    sharding: list[dict[str, Any]] = []
    answering: list[dict[str, Any]] = []
    for name in args.models:
        shards, answers = measure(name, args)
        sharding += shards
        answering += answers
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{text_table(SHARDING, sharding)}\n\n{text_table(ANSWERING, answering)}\n\nload of the machine: {load}")
    print(f"\n{save_rows('published', [*sharding, *answering])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
