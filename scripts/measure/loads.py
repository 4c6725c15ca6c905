"""Loads: the disk loader's bandwidth beside dd with O_DIRECT, what stays in the page cache, sleeps, and a GPU's link.

.venv/bin/python -m scripts.measure.loads disk              # 1.3 GB of 20 MB experts in a temporary file, 5 turns
.venv/bin/python -m scripts.measure.loads sleep             # how late sleeps wake, idle and with every core busy
.venv/bin/python -m scripts.measure.loads emulated          # a worker's emulated loads beside the profile's arithmetic
.venv/bin/python -m scripts.measure.loads cuda              # needs a GPU: bandwidth, overlap, allocations
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from checkpoint.manifest import Blob, LayerSpec, Manifest, TensorSpec
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.emulation.clock import Emulation
from scheduler.timing.profile import find_profile
from scripts.lib.flags import script_parser
from scripts.lib.provenance import header, save_rows
from worker_node.loaders.base import Loader
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.make import make_loader
from worker_node.loaders.memory import MemoryLoader

DD_BLOCKS = ("1M", "4M", "8M", "20M")
AT_ONCE = 16
Row = dict[str, Any]


def never() -> bool:
    return False


def make_store(folder: Path, experts: int, nbytes: int) -> ExpertStore:
    """One layer of blobs whose bytes differ, written past the page cache's memory: synced and dropped."""
    blobs = tuple(Blob(n * nbytes, nbytes, "") for n in range(experts))
    layer = LayerSpec("mlp.experts", "layer-00000.experts", (TensorSpec("w", "bfloat16", (nbytes // 2,), 0),), blobs)
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    with (folder / layer.file).open("wb") as stream:
        for n in track(range(experts), console=Console(stderr=True), description="writing"):
            stream.write(noise.roll(n).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    drop(folder / layer.file)
    return ExpertStore(folder, Manifest(1, "benchmark", "none", "bfloat16", {}, {0: layer}, {}))


def drop(file: Path) -> None:
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(file: Path) -> int:
    """Bytes of a file in the page cache, by mincore(2)."""
    size = file.stat().st_size
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), size) as area:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        held = ctypes.c_char.from_buffer(area)
        start = ctypes.c_void_p(ctypes.addressof(held))
        failed = ctypes.CDLL(None, use_errno=True).mincore(start, ctypes.c_size_t(size), pages)
        del held
    if failed:
        raise OSError(ctypes.get_errno(), "mincore is not allowed here")
    return sum(flag & 1 for flag in bytes(pages)) * mmap.PAGESIZE


# --- disk -------------------------------------------------------------------------------------------------------------


def timed_loads(loader: Loader, into: torch.Tensor, experts: range) -> tuple[float, float]:
    """Each of these experts once, in random order: seconds, and seconds of CPU."""
    start, cpu = time.perf_counter(), time.thread_time()
    for expert in random.sample(experts, len(experts)):
        loader.load(0, expert, into, never)
    return time.perf_counter() - start, time.thread_time() - cpu


def dd(file: Path, block: str, start: int, nbytes: int) -> float:
    """Seconds, as dd itself says: without its start."""
    flags = f"skip={start}", f"count={nbytes}", "iflag=direct,skip_bytes,count_bytes"
    command = ["dd", f"if={file}", "of=/dev/null", f"bs={block}", *flags]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    found = re.search(r"(\d+) bytes.*copied, ([\d.e+-]+) s", said.stderr)
    if found is None or int(found[1]) != nbytes:
        raise RuntimeError(f"dd said {said.stderr!r}")
    return float(found[2])


def disk(args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="odmoe-loads-") as name:
        store = make_store(Path(name), args.experts, args.megabytes << 20)
        return [*bandwidth(store, args.turns, args.chunks), *residency(store)]


def bandwidth(store: ExpertStore, turns: int, chunks: list[int]) -> list[Row]:
    """Everyone reads a few of the experts, in an order drawn anew, then the next few: what else the machine does, and
    what its disk has left, is shared by all."""
    file, first = store.locate(0, 0)
    into = aligned_buffer(first.length)
    loader, cpu = DiskLoader(store), 0.0
    chunked = {"loader": loader.chunk} | {f"loader, {chunk} MiB a read": chunk << 20 for chunk in chunks}
    names = [*chunked, *(f"dd bs={block}" for block in DD_BLOCKS)]
    seconds: dict[str, list[float]] = {name: [0.0] * turns for name in names}
    for turn in track(range(turns), console=Console(stderr=True), description="turns"):
        for at in range(0, store.manifest.experts, AT_ONCE):
            part = range(at, min(at + AT_ONCE, store.manifest.experts))
            for name in random.sample(names, len(names)):
                if name in chunked:
                    loader.chunk = chunked[name]
                    took, used = timed_loads(loader, into, part)
                    cpu += used if name == "loader" else 0.0
                else:
                    took = dd(file, name.partition("=")[2], at * first.length, len(part) * first.length)
                seconds[name][turn] += took
    loader.close()
    if not loader.direct:
        print("this file system has no O_DIRECT: the figures are those of its cache")
    size = file.stat().st_size
    speeds = {name: [size / s / 1e9 for s in found] for name, found in seconds.items()}
    print(f"{store.manifest.experts} experts of {first.length / 2**20:.0f} MiB, {turns} turns, GB/s a turn:")
    for name, found in speeds.items():
        print(f"  {name:<22} median {statistics.median(found):5.2f}   of {' '.join(f'{s:.2f}' for s in found)}")
    print(f"  CPU of a load by the loader: {cpu / turns / store.manifest.experts * 1e3:.2f} ms")
    best = max((name for name in names if name not in chunked), key=lambda name: statistics.median(speeds[name]))
    ratio = statistics.median(speeds["loader"]) / statistics.median(speeds[best])
    print(f"loader / best dd ({best}): {ratio:.2f} (medians)")
    return [{"what": name, "gb_per_s": found} for name, found in speeds.items()] + [{"what": "ratio", "value": ratio}]


def residency(store: ExpertStore) -> list[Row]:
    """What every expert loaded once leaves in the page cache."""
    file, _ = store.locate(0, 0)
    into = aligned_buffer(store.manifest.blob_bytes)
    buffered = DiskLoader(store)
    buffered.direct = False
    rows: list[Row] = []
    print("\nin the page cache (mincore) after every expert was loaded and evicted:")
    for name, loader in (("disk", DiskLoader(store)), ("disk, no O_DIRECT", buffered), ("memory", MemoryLoader(store))):
        drop(file)
        before = resident(file)
        took, cpu = timed_loads(loader, into, range(store.manifest.experts))
        loader.close()
        after, size = resident(file), file.stat().st_size
        speed, cpu_ms = size / took / 1e9, cpu / store.manifest.experts * 1e3
        rows.append({"what": name, "resident_before": before, "resident_after": after, "of": size, "gb_per_s": speed})
        print(f"  {name:<20} {before / size:4.0%} before, {after / size:4.0%} after; {speed:.2f} GB/s, "
              f"{cpu_ms:.1f} ms of CPU a load")  # fmt: skip
    return rows


# --- sleeping ---------------------------------------------------------------------------------------------------------


@contextmanager
def busy(processes: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def overshoots(wait: Callable[[float], object], seconds: float, count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.monotonic()
        wait(seconds)
        found.append(time.monotonic() - start - seconds)
    return sorted(found)


def sleep(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    cores = len(os.sched_getaffinity(0))
    ways = {"time.sleep": time.sleep, "Event.wait": threading.Event().wait}
    print("wakes late by, microseconds: median, 90 %, most")
    for load in (0, 2 * cores):
        with busy(load):
            for name, wait in ways.items():
                for milliseconds in (0.45, 1.4, 3.6, 25.0):
                    late = [s * 1e6 for s in overshoots(wait, milliseconds / 1e3, args.turns * 20)]
                    mid, most = late[len(late) // 2], late[int(len(late) * 0.9)]
                    print(f"  {load} busy processes  {name:<11} {milliseconds:5.2f} ms  "
                          f"{mid:7.0f} {most:7.0f} {late[-1]:7.0f}")  # fmt: skip
                    rows.append({"busy": load, "what": name, "ms": milliseconds, "late_us": [mid, most, late[-1]]})
    return rows


def emulated(args: argparse.Namespace) -> list[Row]:
    """Loads of one worker on end, of a small expert: the bytes move, the time is the profile's."""
    emulation = Emulation(find_profile(args.profile))
    rows: list[Row] = []
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="odmoe-loads-") as name:
        store = make_store(Path(name), 16, 1 << 20)
        loader = make_loader("emulated", store, emulation)
        into, given_up = aligned_buffer(store.manifest.blob_bytes), threading.Event()
        for load in (0, 2 * cores):
            with busy(load):
                start = at = emulation.now()
                cpu = time.process_time()
                for n in range(args.loads):
                    loader.pace.begin_load(at)
                    loader.load(0, n % 16, into, never)
                    at = loader.pace.end_load(given_up)
                took, cpu = time.monotonic() - start, time.process_time() - cpu
            should = args.loads * emulation.profile.load_s
            print(f"{load} busy processes: {args.loads} loads in {took:.4f} s, {should:.4f} s by the profile: "
                  f"{took / should:.4f} times; {cpu / took:.1%} of a core; {emulation.label}")  # fmt: skip
            rows.append({"busy": load, "loads": args.loads, "took_s": took, "should_s": should, "cpu_s": cpu,
                         "emulated": emulation.profile.name})  # fmt: skip
        loader.close()
    return rows


# --- a GPU ------------------------------------------------------------------------------------------------------------


def cuda(args: argparse.Namespace) -> list[Row]:
    """The loader beside one large pinned copy; loads beside computations; allocations."""
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="odmoe-loads-") as name:
        store = make_store(Path(name), args.experts, args.megabytes << 20)
        loader = make_loader("cuda", store)
        nbytes = store.manifest.blob_bytes
        slots = [torch.zeros(nbytes, dtype=torch.uint8, device=loader.device) for _ in range(2)]
        loader.prepare(slots)
        print(f"{torch.cuda.get_device_name()}, {args.experts} experts of {nbytes / 2**20:.0f} MiB")
        plain = plain_copy(nbytes, args.turns)
        counted = torch.cuda.memory_stats()["allocation.all.allocated"]
        every = range(args.experts)
        speeds = [args.experts * nbytes / timed_loads(loader, slots[0], every)[0] / 1e9 for _ in range(args.turns)]
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - counted
        alone, beside = overlap(loader, every, slots)
        loader.close()
    speed = statistics.median(speeds)
    print(f"loader {speed:.2f} GB/s; one copy of pinned memory of that size {plain:.2f} GB/s: {speed / plain:.2f}")
    print(f"allocations on the GPU by {args.turns * args.experts} loads: {made}")
    print(f"computing {alone * 1e3:.2f} ms alone, {beside * 1e3:.2f} ms while loads run: {beside / alone:.2f} times")
    return [{"loader_gb_per_s": speeds, "plain_gb_per_s": plain, "allocations": made, "alone_s": alone,
             "beside_s": beside}]  # fmt: skip


def plain_copy(nbytes: int, turns: int) -> float:
    """GB/s of `copy_` from torch's own pinned memory, timed by events."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(turns * 10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(nbytes / begin.elapsed_time(end) / 1e6)
    return statistics.median(found)


def overlap(loader: Loader, experts: range, slots: list[torch.Tensor]) -> tuple[float, float]:
    """Seconds of the same products on one slot's stream, alone and while the other slot is loaded on end."""
    factor = torch.randn(4096, 4096, device=loader.device, dtype=torch.bfloat16)

    def compute() -> float:
        start = time.perf_counter()
        with loader.computing(slots[1]):
            for _ in range(50):
                product = factor @ factor
            product[0, 0].cpu()
        return time.perf_counter() - start

    def load() -> None:
        while not stop.is_set():
            timed_loads(loader, slots[0], experts)

    torch.cuda.synchronize()
    compute()
    alone = statistics.median(compute() for _ in range(5))
    stop = threading.Event()
    thread = threading.Thread(target=load)
    thread.start()
    beside = statistics.median(compute() for _ in range(5))
    stop.set()
    thread.join(60)
    return alone, beside


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
        "disk": disk, "sleep": sleep, "emulated": emulated, "cuda": cuda,
    }  # fmt: skip
    parser = script_parser(__doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--folder", default=str(Path.home()), help="on the disk that is to be measured")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--chunks", type=int, nargs="*", default=[8], help="other chunk sizes to compare, MiB")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--profile", default="rtx3090-1gbe")
    parser.add_argument("--loads", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    needed = args.experts * (args.megabytes << 20) if args.part in ("disk", "cuda") else 1 << 25
    if shutil.disk_usage(args.folder).free < needed + (1 << 30):
        parser.error(f"--folder {args.folder} has no {needed / 1e9:.1f} GB and one more free")
    header(f"Loads: {args.part}")
    rows = parts[args.part](args)
    print(f"written to {save_rows(f'loads-{args.part}', rows)}")


if __name__ == "__main__":
    main()
