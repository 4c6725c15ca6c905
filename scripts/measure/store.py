"""What making a store costs: memory beside one layer, speed beside dd, resuming after kill -9 at half.

.venv/bin/python -m scripts.measure.store            # a random Mixtral of 2.2 GB
.venv/bin/python -m scripts.measure.store --quick    # 0.2 GB

The checkpoint is under the names that Transformers' save_pretrained writes, a shard a layer. Every run is a process of
its own; all files are dropped from the page cache before it, so that it reads from the disk as dd does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.lib.flags import script_parser
from scripts.lib.paths import ROOT
from scripts.lib.provenance import header, save_rows

DD_BLOCK = 16 << 20
CHILD = """
import json, os, sys, threading, time
from pathlib import Path
import torch, transformers.conversion_mapping, transformers.core_model_loading
from transformers import MixtralForCausalLM
from transformers.utils import logging
from checkpoint.sharding.shard import make_store
from checkpoint.sharding.source import open_source
logging.disable_progress_bar()

def status():
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssFile:", "VmHWM:")}

open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts here
before, peak, over = status(), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, status()["RssAnon"])

threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
made = make_store(open_source(Path(sys.argv[1])), Path(sys.argv[2]))
took = time.perf_counter() - start
over.set()
hwm = status()["VmHWM"] - before["RssAnon"] - before["RssFile"]
start = time.perf_counter()
checked = made.store.verify() if len(sys.argv) > 3 else None
verify_s = time.perf_counter() - start
print(json.dumps({"took_s": took, "anon": max(peak - before["RssAnon"], 0), "hwm": hwm, "resumed": made.resumed,
    "verify_s": verify_s, "verified": checked.nbytes if checked else 0}), flush=True)
"""


@dataclass(frozen=True)
class Shape:
    """A Mixtral of one family's proportions."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int = 8192
    experts: int = 8

    @property
    def layer_bytes(self) -> int:
        """The experts of one layer, bfloat16."""
        return self.experts * 3 * self.hidden * self.intermediate * 2


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Random weights under the old per-expert names, one layer in memory at a time."""
    from safetensors.torch import save_file
    from transformers import MixtralConfig

    hidden, random = shape.hidden, torch.Generator().manual_seed(1)
    MixtralConfig(
        hidden_size=hidden, intermediate_size=shape.intermediate, num_local_experts=shape.experts,
        num_hidden_layers=shape.layers, vocab_size=shape.vocab, num_attention_heads=16, num_key_value_heads=4,
        dtype="bfloat16", architectures=["MixtralForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    weight_map: dict[str, str] = {}

    def save(number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        name = f"model-{number:05d}-of-{shape.layers + 1:05d}.safetensors"
        tensors = {
            f"{key}.weight": torch.empty(size, dtype=torch.bfloat16).uniform_(-0.1, 0.1, generator=random)
            for key, size in shapes.items()
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    square, narrow = (hidden, hidden), (hidden // 4, hidden)
    wide, tall = (shape.intermediate, hidden), (hidden, shape.intermediate)
    save(1, {"model.embed_tokens": (shape.vocab, hidden), "lm_head": (shape.vocab, hidden), "model.norm": (hidden,)})
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}.self_attn.{n}_proj": square for n in "qo"}
        shapes |= {f"{prefix}.self_attn.{n}_proj": narrow for n in "kv"}
        shapes |= {f"{prefix}.{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
        shapes[f"{prefix}.block_sparse_moe.gate"] = (shape.experts, hidden)
        for expert in range(shape.experts):
            names = {"w1": wide, "w2": tall, "w3": wide}
            shapes |= {f"{prefix}.block_sparse_moe.experts.{expert}.{n}": size for n, size in names.items()}
        save(layer + 2, shapes)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop(folder: Path) -> None:
    """Out of the page cache, and everything to the disk."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(files: list[Path], target: Path, *how: str) -> float:
    """Seconds that dd needs to write the bytes of `files` to `target`."""
    started, took = time.perf_counter(), 0.0
    for number, file in enumerate(files):
        where = target / str(number) if target.is_dir() else target
        done = subprocess.run(
            ["dd", f"if={file}", f"of={where}", f"bs={DD_BLOCK}", *how], capture_output=True, text=True, check=True
        )
        found = re.search(r"copied, ([\d.]+(?:e-\d+)?) s", done.stderr)
        took += float(found.group(1)) if found else time.perf_counter() - started
    return took


def dd_copy(model: Path, folder: Path, *how: str) -> float:
    """The same bytes, read and written by dd."""
    drop(model)
    target = folder / "dd"
    target.mkdir()
    try:
        return dd(sorted(model.glob("*.safetensors")), target, "conv=fsync", *how)
    finally:
        shutil.rmtree(target)


def dd_write(nbytes: int, folder: Path) -> float:
    """As many bytes, written only, past the page cache."""
    target = folder / "zeros"
    how = ("oflag=direct", "conv=fsync", f"count={nbytes // DD_BLOCK}")
    try:
        return dd([Path("/dev/zero")], target, *how) * nbytes / (nbytes // DD_BLOCK * DD_BLOCK)
    finally:
        target.unlink(missing_ok=True)


def child(model: Path, target: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(model), str(target), *more],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=1800)
    if process.returncode:
        raise RuntimeError(f"making the store failed with {process.returncode}")
    return dict(json.loads(out))


def made(model: Path, folder: Path, *more: str) -> dict[str, Any]:
    """A store from nothing, removed again."""
    drop(model)
    try:
        return finish(child(model, folder / "store", *more))
    finally:
        shutil.rmtree(folder / "store", ignore_errors=True)


def killed_at_half(model: Path, folder: Path, layers: int) -> dict[str, Any]:
    """kill -9 when half of the layers are in the journal; what the next run then needs."""
    from checkpoint.sharding.partial_store import partial_of

    drop(model)
    target, process = folder / "killed", child(model, folder / "killed")
    journal = partial_of(target) / "journal"
    while process.poll() is None:
        if journal.exists() and journal.read_text().count('"layer"') >= layers // 2:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    process.communicate()
    drop(folder)
    try:
        return finish(child(model, target, "verify"))
    finally:
        shutil.rmtree(target, ignore_errors=True)


def measure(folder: Path, shape: Shape, turns: int) -> list[dict[str, Any]]:
    model = folder / "model"
    write_checkpoint(model, shape)
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    print(f"checkpoint {nbytes / 1e9:.2f} GB, one layer's experts {shape.layer_bytes / 1e6:.1f} MB, {turns} turns\n")
    ours, copies, buffered, writes = [], [], [], []
    for _ in range(turns):  # in turns, so that a neighbour disturbs all of them alike
        ours.append(made(model, folder, "verify"))
        copies.append(dd_copy(model, folder, "iflag=direct", "oflag=direct"))
        buffered.append(dd_copy(model, folder))
        writes.append(dd_write(nbytes, folder))
    took = statistics.median(run["took_s"] for run in ours)
    verify = statistics.median(run["verified"] / run["verify_s"] for run in ours)
    rows: list[dict[str, Any]] = [{"what": "odmoe shard", "gb_per_s": nbytes / took / 1e9}]
    for name, seconds in (("dd, direct", copies), ("dd, buffered", buffered), ("dd, direct, writing only", writes)):
        median = statistics.median(seconds)
        rows.append({"what": name, "gb_per_s": nbytes / median / 1e9, "shard_is_times_as_fast": median / took})
    for row in rows:
        beside = f", shard is {row['shard_is_times_as_fast']:.2f} times as fast" if len(row) > 2 else ""
        print(f"{row['what']:<26} {row['gb_per_s']:.2f} GB/s{beside}")
    rows.append({"what": "verify", "gb_per_s": verify / 1e9})
    print(f"{'read back and verify':<26} {verify / 1e9:.2f} GB/s")
    for what, key in (("anonymous memory", "anon"), ("all memory, VmHWM", "hwm")):
        peak = max(run[key] for run in ours)
        rows.append({"what": what, "peak_bytes": peak, "of_a_layer": peak / shape.layer_bytes})
        print(f"{what:<26} {peak / 1e6:.0f} MB above imports: {peak / shape.layer_bytes:.2f} of a layer's experts")
    again = killed_at_half(model, folder, shape.layers)
    share = again["took_s"] / took
    rows.append({"what": "resumed", "layers": again["resumed"], "took_s": again["took_s"], "of_the_whole": share})
    print(f"killed -9 at half, resumed {again['resumed']} of {shape.layers} layers: {again['took_s']:.2f} s, ", end="")
    print(f"{share:.2f} of the {took:.2f} s of making it in one go; verified")
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="0.2 GB in place of 2.2")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary directory when not given")
    args = parser.parse_args()
    header("Making an expert store")
    shape = Shape(8, 512, 1024) if args.quick else Shape(12, 1024, 3584)
    with tempfile.TemporaryDirectory(prefix="odmoe-store-", dir=args.folder) as name:
        needed = 3 * (shape.layers * shape.layer_bytes + (1 << 29))
        if (free := shutil.disk_usage(name).free) < needed:
            raise SystemExit(f"{name} has {free:,} bytes free, {needed:,} are needed; give another --folder")
        rows = measure(Path(name), shape, args.turns)
    print(f"written to {save_rows('store', rows)}")


if __name__ == "__main__":
    main()
