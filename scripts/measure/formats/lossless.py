"""Whether a lossless form of bfloat16 experts would make loads shorter: bytes, speed of restoring, and what follows.

Trained weights (experts of models/demo-moe and models/deep-moe, put together to pieces of an expert's size) and random
normal ones are compressed by each coder and restored into memory that is there already, in alternated turns, on one
thread and on as many as there are cores. What comes back is compared with what went in. The disk is read past the page
cache by the project's own loader. A load of compressed bytes takes their move and their restoring, one after the other
or overlapped, whichever of them is slower.

zipnn, zstandard and lz4 are used where they are installed. DFloat11 and nvCOMP restore on a GPU alone.

    .venv/bin/python -m pip install zipnn zstandard lz4
    .venv/bin/python -m scripts.measure.formats.lossless
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from odmoe.bench.loads import measure_disk, temporary_store
from odmoe.stores import cache_dir
from scripts.checkpoints.lossless import Bytes, Codec, codecs, exponent_entropy, times_shorter
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEEP, DEMO
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table

EXPERT_BYTES = 3 * 2048 * 768 * 2
"""Of Qwen3-30B-A3B."""
LINKS = {"1 GB/s": 1e9, "25 GB/s": 25e9}
DISK = "disk"
NORMAL = "random normal"


@dataclass(frozen=True, slots=True)
class Weights:
    name: str
    pieces: list[Bytes]
    """Each of an expert's size, or what is left."""


def trained(model: Path) -> Weights:
    """All experts' weights of a bfloat16 checkpoint."""
    with safe_open(model / "model.safetensors", "pt") as file:
        found = [file.get_tensor(name) for name in file.keys() if ".experts." in name]  # noqa: SIM118
    if any(weight.dtype != torch.bfloat16 for weight in found):
        raise SystemExit(f"{model} is not in bfloat16; give a checkpoint that is")
    return Weights(model.name, _pieces(torch.cat([weight.flatten() for weight in found])))


def normal(count: int) -> Weights:
    drawn = torch.randn(count * EXPERT_BYTES // 2, generator=torch.Generator().manual_seed(0))
    return Weights(NORMAL, _pieces(drawn.mul_(0.02).to(torch.bfloat16)))


def _pieces(values: torch.Tensor) -> list[Bytes]:
    return [np.ascontiguousarray(one) for one in _cut(values.view(torch.uint8).numpy())]


def _cut(data: Bytes) -> list[Bytes]:
    return [data[first : first + EXPERT_BYTES] for first in range(0, len(data), EXPERT_BYTES)]


@dataclass(slots=True)
class Held:
    """The pieces as one coder keeps them."""

    codec: Codec
    parts: list[Any]
    nbytes: int
    compress_s: float
    rates: dict[int, list[float]]
    """By threads: original bytes restored a second, a turn each."""


def held(codec: Codec, weights: Weights) -> Held:
    """Raises SystemExit where a bit was lost."""
    began = time.perf_counter()
    made = [codec.compress(piece) for piece in weights.pieces]
    seconds = time.perf_counter() - began
    for piece, (part, _) in zip(weights.pieces, made, strict=True):
        into = np.empty_like(piece)
        codec.restore(part, into)
        if not np.array_equal(into, piece):
            raise SystemExit(f"{codec.name} restores other bytes of {weights.name} than it was given")
    return Held(codec, [part for part, _ in made], sum(nbytes for _, nbytes in made), seconds, {})


def restore_rate(one: Held, weights: Weights, threads: int, seconds: float) -> float:
    """Original bytes a second, every thread with slots of its own, for about so many seconds."""
    sizes = [len(piece) for piece in weights.pieces]

    def work(slot: Bytes) -> int:
        done, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            for part, size in zip(one.parts, sizes, strict=True):
                one.codec.restore(part, slot[:size])
                done += size
        return done

    slots = [np.ones(max(sizes), np.uint8) for _ in range(threads)]
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, slots)) / (time.perf_counter() - began)


def rows(weights: Weights, coders: Sequence[Codec], links: dict[str, float], turns: int) -> list[dict[str, Any]]:
    cores = len(os.sched_getaffinity(0))
    kept = [held(codec, weights) for codec in coders]
    for turn in range(turns):
        for one in kept if turn % 2 else reversed(kept):
            for threads in (1, cores):
                one.rates.setdefault(threads, []).append(restore_rate(one, weights, threads, 0.3))
    size = sum(map(len, weights.pieces))
    bound = (8 + statistics.mean(map(exponent_entropy, weights.pieces))) / 16
    return [_row(weights.name, one, size, bound, cores, links) for one in kept]


def _row(name: str, one: Held, size: int, bound: float, cores: int, links: dict[str, float]) -> dict[str, Any]:
    ratio = one.nbytes / size
    rates = {threads: statistics.median(each) for threads, each in one.rates.items()}
    found = {
        "weights": name,
        "coder": one.codec.name,
        "ratio": ratio,
        "bound": bound,
        "disk_bytes_per_s": links[DISK],
        "compress_bytes_per_s": size / one.compress_s,
        "restore_bytes_per_s": rates[1],
        "restore_all_bytes_per_s": rates[cores],
        "turns": one.rates,
    }
    for link, rate in links.items():
        for overlapped in (False, True):
            key = f"{link}, overlapped" if overlapped else link
            found[key] = times_shorter(ratio, rates[1], rate, overlapped)
    return found


COLUMNS = (
    Column("weights", "weights"),
    Column("coder", "coder"),
    Column("bytes over bf16", "ratio", ".3f"),
    Column("at least", "bound", ".3f"),
    Column("compress GB/s", "compress_bytes_per_s", ".2f", 1e-9),
    Column("restore GB/s, 1 thread", "restore_bytes_per_s", ".2f", 1e-9),
    Column("all cores", "restore_all_bytes_per_s", ".2f", 1e-9),
    Column("disk GB/s", "disk_bytes_per_s", ".2f", 1e-9),
    *(
        Column(f"times shorter: {name}", name, ".2f")
        for link in (DISK, *LINKS)
        for name in (link, f"{link}, overlapped")
    ),
)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--turns", type=positive, default=7, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=cache_dir(), help="on the disk that is read (%(default)s)")
    args = parser.parse_args()
    header("Lossless forms of bfloat16 experts")
    torch.set_num_threads(1)
    coders, missing = codecs()
    if missing:
        print(f"not installed: {', '.join(missing)}; .venv/bin/python -m pip install {' '.join(missing)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    with temporary_store(args.folder, EXPERT_BYTES, lambda done, total: None) as store:
        disk = measure_disk(store, lambda done, total: None)
    where = "past" if disk.past_cache else "through"
    slowest, median, fastest = (rate / 1e9 for rate in (disk.slowest, disk.bytes_per_s, disk.fastest))
    print(f"disk: {median:.2f} GB/s ({slowest:.2f} to {fastest:.2f}), {where} the page cache, loads of an expert")
    links = {DISK: disk.bytes_per_s, **LINKS}
    found: list[dict[str, Any]] = []
    for weights in (trained(DEMO), trained(DEEP), normal(3)):
        print(weights.name, file=sys.stderr, flush=True)
        found += rows(weights, coders, links, args.turns)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{text_table(COLUMNS, found)}\n\nload of the machine: {load}\n\n{save_rows('lossless', found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
