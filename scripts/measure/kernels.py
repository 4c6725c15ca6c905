"""How fast few rows are multiplied with a weight, by kernel, and what that makes of decode tokens/s.

First GB/s of weight for each call, number of threads and shape, in turns, over more weights than fit into caches, with
the share of outputs that differ from those of `linear` in a sum that cancels to zero (checkpoint/kernels.py). Then
decode tokens/s of one fully-cached cluster that computes with each kernel in turns, the same forced tokens each time.

    .venv/bin/python -m scripts.measure.kernels --quick
    .venv/bin/python -m scripts.measure.kernels --model STORE --threads 2

One thread is timed by its processor time, several by the clock: on a busy machine only the former is steady.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from checkpoint.kernels import Linear, linear_of, probes, weight_first
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import KERNELS, Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from scripts.lib.flags import positive, script_parser
from scripts.lib.provenance import header, save_rows
from scripts.lib.quality import Forced
from scripts.lib.tables import Column, text_table

PARTS = ("products", "decode")
SHAPES = ((192, 512), (2048, 1536), (768, 2048), (2048, 7168), (3584, 2048), (1024, 7168), (4096, 28672), (14336, 4096))
"""Inputs and outputs of the two products of an expert: of a demo, Qwen3-MoE, a fine and a coarse MoE, Mixtral."""
QUICK_SHAPES = SHAPES[:5]
TURN_BYTES = 1 << 26
PROMPT_TOKENS = 16
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def without_onednn(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        return functional.linear(rows, weight)


def read(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Reads the weight and computes next to nothing."""
    return weight.view(torch.uint8).max()


PRODUCTS: dict[str, Product] = {
    "linear": functional.linear,
    "weight first": weight_first,
    "linear, no oneDNN": without_onednn,
    "read": read,
}


def speeds(inputs: int, outputs: int, count: int, memory: torch.Tensor, turns: int) -> dict[str, Any]:
    """A row: of each call GB/s of weight (median), those over `linear` in the same turn, and outputs that differ."""
    threads, size = torch.get_num_threads(), inputs * outputs * memory.itemsize
    weights = memory[: memory.numel() // (inputs * outputs) * inputs * outputs].view(-1, outputs, inputs).unbind()
    rows = torch.randn(count, inputs).to(torch.bfloat16)
    clock = time.thread_time if threads == 1 else time.perf_counter
    a_turn, done = max(1, min(len(weights), TURN_BYTES // size)), 0
    seconds: dict[str, list[float]] = {name: [] for name in PRODUCTS}
    for _ in range(turns):
        for name, product in PRODUCTS.items():
            start = clock()
            for n in range(done, done + a_turn):
                product(rows, weights[n % len(weights)])
            seconds[name].append((clock() - start) / a_turn)
            done += a_turn
    row: dict[str, Any] = {"threads": threads, "inputs": inputs, "outputs": outputs, "rows": count}
    for name, product in PRODUCTS.items():
        faster = [a / b for a, b in zip(seconds["linear"], seconds[name], strict=True)]
        row |= {
            f"{name}: gb_per_s": size / statistics.median(seconds[name]) / 1e9,
            f"{name}: over_linear": statistics.median(faster),
            f"{name}: differing": None if product is read else differing(product, count, weights[0]),
        }
    return row


def differing(product: Product, count: int, weight: torch.Tensor) -> float:
    """The share of outputs whose bits are not those of `linear`."""
    pairs = [(functional.linear(*probe), product(*probe)) for probe in probes((count,), weight)]
    return statistics.mean(float((a != b).float().mean()) for a, b in pairs)


COLUMNS = (
    Column("threads", "threads", "d"),
    Column("inputs", "inputs", "d"),
    Column("outputs", "outputs", "d"),
    Column("rows", "rows", "d"),
    *(Column(f"{name}, GB/s", f"{name}: gb_per_s", ".1f") for name in PRODUCTS),
    *(
        Column(f"{name}: {what}", f"{name}: {key}", form)
        for name in ("weight first", "linear, no oneDNN")
        for what, key, form in (("over linear", "over_linear", ".2f"), ("differing", "differing", ".3f"))
    ),
)


def make_model(path: Path, layers: int) -> str:
    """A random Qwen3-MoE in bfloat16: 64 experts of 2048 x 768, top-8, 0.6 GB a layer."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16384,
        hidden_size=2048,
        intermediate_size=768,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return str(path)


def decode(store: ExpertStore, threads: int, tokens: int, turns: int) -> Iterator[dict[str, Any]]:
    """A row for each kernel: tokens/s (median), over those of `linear` in the same turn, and how the logits compare."""
    settings = Settings(model=str(store.dense), system="fully-cached", workers=1, threads=threads)
    kernels: dict[str, Callable[..., bool]] = {"linear": lambda *_: False}
    kernels |= {name: functools.partial(Linear.is_weight_first, linear_of(name)) for name in KERNELS}
    rates: dict[str, list[float]] = {name: [] for name in kernels}
    logits: dict[str, torch.Tensor] = {}
    cluster: Any = start_cluster(settings, store)
    try:
        words = cluster.main.model.get_input_embeddings().num_embeddings
        text = torch.randint(words, (PROMPT_TOKENS + tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        for turn in range(turns + 1):
            for name, choice in kernels.items():
                with mock.patch.object(Linear, "is_weight_first", choice):
                    answer = cluster.main.generate(text[:PROMPT_TOKENS], tokens, ignore_eos=True)
                    answer.request.chooser = forced = Forced(text[PROMPT_TOKENS:])
                    *_, last = answer
                if turn:  # the first one warms up
                    rates[name].append(last.report.decode_tokens_per_s)
                logits[name] = torch.stack(forced.logits)
    finally:
        cluster.close()
    wanted = logits["linear"]
    for name, of in rates.items():
        got = logits[name]
        yield {
            "part": "decode",
            "threads": threads,
            "kernel": name,
            "tokens_per_s": statistics.median(of),
            "over_linear": statistics.median(a / b for a, b in zip(of, rates["linear"], strict=True)),
            "equal_logits": float((got == wanted).float().mean()),
            "same_argmax": float((got.argmax(-1) == wanted.argmax(-1)).float().mean()),
            "difference": float((got - wanted).abs().max() / wanted.abs().max()),
        }


DECODE = (
    Column("threads", "threads", "d"),
    Column("kernel", "kernel"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("over linear", "over_linear", ".3f"),
    Column("equal logits", "equal_logits", ".4f"),
    Column("same argmax", "same_argmax", ".4f"),
    Column("largest difference", "difference", ".1e"),
)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", help="checkpoint or store in bfloat16 (default: a random one of 64 experts)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help=f"({' '.join(PARTS)})")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--rows", type=positive, nargs="+", help="rows of a product (1 8 32; --quick: 1)")
    parser.add_argument("--tokens", type=positive, default=24, help="of each answer (%(default)s)")
    parser.add_argument("--turns", type=positive, help="(9; --quick: 5)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and turns, a model of one layer")
    args = parser.parse_args()
    args.rows = args.rows or ([1] if args.quick else [1, 8, 32])
    args.turns = args.turns or (5 if args.quick else 9)
    return args


def products(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    memory = aligned_buffer(1 << 30).view(torch.bfloat16)
    piece = (torch.randn(1 << 20) / 50).to(torch.bfloat16)
    memory.view(-1, len(piece))[:] = piece
    for threads in args.threads:
        torch.set_num_threads(threads)
        for inputs, outputs in QUICK_SHAPES if args.quick else SHAPES:
            for count in args.rows:
                yield {"part": "products"} | speeds(inputs, outputs, count, memory, args.turns)


def decoded(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            store = prepare_store(args.model, None, "bfloat16")
        else:
            made = make_model(Path(folder) / "model", 1 if args.quick else 2)
            store = prepare_store(made, str(Path(folder) / "store"), "bfloat16")
        return [row for threads in args.threads for row in decode(store, threads, args.tokens, args.turns)]


def main() -> int:
    args = parse()
    prepare_process()
    prepare_libraries(args.threads[0])
    header("Products of few rows, by kernel")
    rows = [*products(args)] if "products" in args.parts else []
    if rows:
        print(f"{text_table(COLUMNS, rows)}\n", flush=True)
    if "decode" in args.parts:
        answers = decoded(args)
        print(f"{text_table(DECODE, answers)}\n")
        rows += answers
    print(save_rows("kernels", rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
