"""What a role on an accelerator does: tokens, loads, overlap, speed, memory and waits, each beside a limit.

    tokens     of the cluster, every role on the device, and of Transformers `eager` there
    loads      bytes a second of the CUDA loader, beside one large copy from page-locked memory (the link's limit)
    overlap    a load beside products on the device: the share of the shorter of both that is hidden
    decode     tokens a second with every expert in a slot, beside `eager` on the same device, in turns
    memory     what the report counts, beside the most that torch's allocator held
    waits      calls by which the host waits for the device, a token, by name, from torch.profiler

On the processor only tokens and decode are measured; the other lines say that they were not.

    .venv/bin/python -m scripts.measure.device
    .venv/bin/python -m scripts.measure.device --device cuda --dtype bfloat16 --model MODEL
    .venv/bin/python -m scripts.measure.device --device cpu --tokens 8 --turns 1
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch

from checkpoint.devices.names import accelerator_name, find_device
from checkpoint.store import ExpertStore
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.stores import prepare_store
from odmoe.text import encode, load_tokenizer
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from wire.machine import processor_name

LINK_BYTES = 1 << 30
"""Of the copy that shows the link's limit."""
LOADS = 32
CONTEXT = 1 << 16
"""More tokens than any of the prompts has."""
WAITS = ("Synchronize", "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "Memcpy DtoH")
"""Parts of the names of what makes the host wait."""
UNMEASURED = "not measured: no CUDA device"
Row = tuple[str, str, str]
PARTS = ("what", "found", "beside")
"""Of a row."""


class Eager:
    """Transformers alone, every expert on the device."""

    def __init__(self, model: str, dtype: str, device: torch.device, ids: list[int]) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), experts_implementation="eager"
        ).to(device)
        self._ids = torch.tensor([ids], device=device)

    def answer(self, count: int) -> tuple[list[int], float]:
        """Greedy tokens, and decode passes a second."""
        with torch.inference_mode():
            out = self._model(self._ids, use_cache=True, logits_to_keep=1)
            tokens = [int(out.logits[0, -1].argmax())]
            start = time.perf_counter()
            while len(tokens) < count:
                token = torch.tensor([[tokens[-1]]], device=self._ids.device)
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
                tokens.append(int(out.logits[0, -1].argmax()))
        return tokens, (count - 1) / (time.perf_counter() - start)


def answer(cluster: EmbeddedCluster, ids: list[int], count: int) -> tuple[list[int], Any]:
    steps = list(cluster.generate(ids, count, ignore_eos=True))
    return [step.token_id for step in steps if step.token_id is not None], steps[-1].report


# --- parts ------------------------------------------------------------------------------------------------------------


def measure_tokens(cluster: EmbeddedCluster, eager: Eager, ids: list[int], count: int) -> Iterator[Row]:
    wanted, (found, report) = eager.answer(count)[0], answer(cluster, ids, count)
    same = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), count)
    yield "tokens equal eager's", f"{same} of {count}", "exact" if report.exact else "the report says approximate"
    for role, names in report.devices.items():
        yield f"device of {role}", names if isinstance(names, str) else ", ".join(sorted(set(names))), ""


def measure_decode(cluster: EmbeddedCluster, eager: Eager, ids: list[int], count: int, turns: int) -> Iterator[Row]:
    """Alternated, so that both have the same machine."""
    answer(cluster, ids, count)
    eager.answer(count)
    ours, ratios = [], []
    for _ in range(turns):
        rate = answer(cluster, ids, count)[1].decode_tokens_per_s
        ours.append(rate)
        ratios.append(rate / eager.answer(count)[1])
    yield "decode", f"{statistics.median(ours):.1f} tokens/s", f"{statistics.median(ratios):.2f} x eager"


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _link_rate(device: torch.device) -> float:
    """Bytes a second of one large copy from page-locked memory."""
    pinned = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    return LINK_BYTES / min(_seconds(lambda: there.copy_(pinned, non_blocking=True)) for _ in range(5))


def measure_loads(store: ExpertStore, device: torch.device) -> Iterator[Row]:
    """Loads and products on the default stream, each alone and both at once."""
    from worker_node.loaders.cuda import CudaLoader

    link = _link_rate(device)
    loader = CudaLoader(store, str(device))
    slot = torch.zeros(store.manifest.blob_bytes, dtype=torch.uint8, device=device)
    experts = [(layer, n) for layer, spec in store.manifest.layers.items() for n in range(len(spec.blobs))][:LOADS]
    with closing(loader):
        loader.prepare([slot])

        def load() -> int:
            return sum(loader.load(layer, expert, slot, lambda: False) for layer, expert in experts)

        moved = load()
        alone = min(_seconds(load) for _ in range(5))
        yield "loads", f"{moved / alone / 1e9:.2f} GB/s", f"{moved / alone / link:.0%} of {link / 1e9:.2f} GB/s"
        yield from _overlap(load, alone, device)


def _overlap(load: Callable[[], object], alone: float, device: torch.device) -> Iterator[Row]:
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    multiply(10)
    times = max(1, round(alone / (_seconds(lambda: multiply(50)) / 50)))
    products = _seconds(lambda: multiply(times))

    def both() -> None:
        multiply(times)  # enqueued, and not waited for
        load()

    together = min(_seconds(both) for _ in range(5))
    hidden = (alone + products - together) / min(alone, products)
    yield "overlap", f"{hidden:.0%} hidden", f"loads {alone:.4f} s, products {products:.4f} s, both {together:.4f} s"


def measure_waits(cluster: EmbeddedCluster, ids: list[int], count: int) -> Iterator[Row]:
    """The difference of two answers, so that a request's beginning does not count."""
    from torch.profiler import ProfilerActivity, profile

    counts: list[Counter[str]] = []
    for tokens in (count, 2 * count):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            answer(cluster, ids, tokens)
        every = {event.key: event.count for event in profiled.key_averages()}
        counts.append(Counter({key: n for key, n in every.items() if any(part in key for part in WAITS)}))
    layers = len(cluster.main.shape.layers)
    for key, n in sorted((counts[1] - counts[0]).items()):
        yield f"waits: {key}", f"{n / count:.1f} a token", f"{layers} layers"


def measure_memory(cluster: EmbeddedCluster, ids: list[int], count: int, device: torch.device) -> Iterator[Row]:
    torch.accelerator.reset_peak_memory_stats(device)
    held = answer(cluster, ids, count)[1].memory_bytes
    counted = sum(sum(one) if isinstance(one, list) else one for one in held.values())
    most = torch.accelerator.max_memory_allocated(device)
    yield "memory", f"{most / 1e6:.1f} MB allocated at most", f"reports count {counted / 1e6:.1f} MB"


# --- all of them ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO), help="a checkpoint (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="(%(default)s)")
    parser.add_argument("--device", default="auto", help="of every role (%(default)s)")
    parser.add_argument("--shadow", default="none", help="its precision, for tokens and waits (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=32, help="of each answer (%(default)s)")
    parser.add_argument("--turns", type=positive, default=5, help="of decode (%(default)s)")
    args = parser.parse_args()
    device = find_device(args.device)
    header("devices")
    prepare_process()
    common = {"model": args.model, "dtype": args.dtype, "workers": 1, "device": args.device, "audit": 0.0}
    if device.type == "cuda":
        common["worker_device"] = str(device)
    prepare_libraries(Settings(**common, shadow="none").threads_a_node)
    store = prepare_store(args.model, None, args.dtype)
    ids = encode(load_tokenizer(store.dense), gsm8k_prompts(1)[0], CONTEXT)
    eager = Eager(args.model, args.dtype, device, ids)
    rows: list[Row] = []
    with closing(EmbeddedCluster(Settings(**common, shadow=args.shadow, slots=1), store)) as cluster:
        rows += measure_tokens(cluster, eager, ids, args.tokens)
    with closing(EmbeddedCluster(Settings(**common, shadow="none", residency="all"), store)) as cluster:
        rows += measure_decode(cluster, eager, ids, args.tokens, args.turns)
        del eager
        if device.type == "cuda":
            rows += measure_waits(cluster, ids, args.tokens)
            rows += measure_memory(cluster, ids, args.tokens, device)
    if device.type == "cuda":
        rows += measure_loads(store, device)
    else:
        rows += [(what, UNMEASURED, "") for what in ("loads", "overlap", "waits", "memory")]
    name = processor_name() if device.type == "cpu" else accelerator_name(device)
    found = [dict(zip(PARTS, row, strict=True)) for row in rows]
    print(f"every role on {device} ({name}), {args.model} in {args.dtype}")
    print(text_table([Column(part, part) for part in PARTS], found))
    print(f"saved: {save_rows(f'device-{device.type}', found)}")


if __name__ == "__main__":
    main()
