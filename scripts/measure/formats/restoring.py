"""How fast an expert is restored from its published numbers, by method, in GB/s of restored bytes.

Methods take turns on weights of gpt-oss's and DeepSeek-V3's experts, in bfloat16. Each is first checked to give the
bits of Transformers' own conversion. Beside them stands what bounds them: a copy of restored bytes, in memory and
within the second cache. One thread, timed by its processor time, the best of all turns: on a busy machine only that is
steady. A second table says what the operations of the torch way take, a third what a decoded token takes of an expert:
the product of one row with each weight, which is in memory, has to be restored, or is multiplied as it is published,
where workers do that (gpt-oss, on CPUs with AMX).

    .venv/bin/python -m scripts.measure.formats.restoring
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from checkpoint.kernels import EXACT
from checkpoint.native.encoding import PIECE, Encoding
from checkpoint.native.fp8 import Fp8
from checkpoint.native.mxfp4 import Mxfp4
from checkpoint.native.product_scratch import PRODUCT_SCRATCH
from checkpoint.native.products import are_possible, multiply
from checkpoint.tensors import aligned_buffer
from scripts.lib.flags import positive, script_parser
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table

MXFP4_SHAPES = {"gpt-oss gate_up": (2880, 5760), "gpt-oss down": (2880, 2880)}
FP8_SHAPES = {"DeepSeek-V3 gate_up": (4096, 7168), "DeepSeek-V3 down": (7168, 2048)}
BLOCK = 128
CACHED = 1 << 18
"""Values of a copy that stays in the second cache."""
TORCH = "torch, 2^17 values"
Method = Callable[[], torch.Tensor]
COLUMNS = (
    Column("weight", "weight"),
    Column("method", "method"),
    Column("GB/s", "gb_per_s", ".2f"),
    Column("median GB/s", "median_gb_per_s", ".2f"),
    Column("over torch", "over_torch", ".2f"),
)
PRODUCTS = (
    Column("weight", "weight"),
    Column("one row, weight", "method"),
    Column("ms", "ms", ".2f"),
    Column("median ms", "median_ms", ".2f"),
    Column("over dequantised", "over_dequantised", ".2f"),
)
OPERATIONS = (Column("weight", "weight"), Column("operation", "operation"), Column("share", "share", ".2f"))


def in_slot(values: torch.Tensor) -> torch.Tensor:
    """In memory like that of a worker's slots: aligned to pages, and of huge ones."""
    return aligned_buffer(values.nbytes).view(values.dtype).view(values.shape).copy_(values)


def compiled(encoding: Encoding, numbers: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> Method:
    (codes,), (held,) = encoding.encode(numbers, scales)
    codes, target = in_slot(codes), in_slot(torch.zeros(shape, dtype=torch.bfloat16))
    scratch = aligned_buffer(encoding.scratch_bytes(shape, PIECE))
    routine = encoding.routine()

    def run() -> torch.Tensor:
        routine(target, codes, held, scratch)
        return target

    return run


def ours(encoding: Encoding, numbers: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], piece: int) -> Method:
    (codes,), (held,) = encoding.encode(numbers, scales)
    codes, target = in_slot(codes), in_slot(torch.zeros(shape, dtype=torch.bfloat16))
    scratch = aligned_buffer(encoding.scratch_bytes(shape, piece))

    def run() -> torch.Tensor:
        encoding.restore(target, codes, held, scratch, piece)
        return target

    return run


def mxfp4_numbers(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales of one weight as published, the same for the same shape."""
    rows, columns = shape
    random = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (1, columns, rows // 32, 16), dtype=torch.uint8, generator=random)
    return numbers, torch.randint(110, 125, (1, columns, rows // 32), dtype=torch.uint8, generator=random)


def mxfp4_methods(shape: tuple[int, int]) -> dict[str, Method]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    numbers, scales = mxfp4_numbers(shape)
    return {
        "Transformers": lambda: convert_moe_packed_tensors(numbers, scales)[0],
        **{f"torch, 2^{p} values": ours(Mxfp4(), numbers, scales, shape, 1 << p) for p in (15, 17, 19)},
        "compiled": compiled(Mxfp4(), numbers, scales, shape),
    }


def fp8_methods(shape: tuple[int, int]) -> dict[str, Method]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = shape
    numbers = torch.randint(0, 0x7F, (1, rows, columns), dtype=torch.uint8)
    scales = torch.rand(1, rows // BLOCK, columns // BLOCK)
    held = numbers[0].view(torch.float8_e4m3fn)
    operation: Any = Fp8Dequantize(None)
    return {
        "Transformers": lambda: operation._dequantize_one(held, scales[0], torch.bfloat16),
        "to float32, in pieces": in_pieces(numbers[0], scales[0], lambda wide, code: wide.copy_(code)),
        "table of 256, in pieces": in_pieces(numbers[0], scales[0], by_table()),
        **{f"torch, 2^{p} values": ours(Fp8(), numbers, scales, shape, 1 << p) for p in (15, 17, 19)},
        "compiled": compiled(Fp8(), numbers, scales, shape),
    }


def by_table() -> Callable[[torch.Tensor, torch.Tensor], Any]:
    table = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    places = torch.empty(PIECE, dtype=torch.int32)

    def convert(wide: torch.Tensor, code: torch.Tensor) -> Any:
        here = places[: code.numel()].view(code.shape)
        here.copy_(code.view(torch.uint8))
        return torch.index_select(table, 0, here.view(-1), out=wide.view(-1))

    return convert


def in_pieces(
    numbers: torch.Tensor, scales: torch.Tensor, convert: Callable[[torch.Tensor, torch.Tensor], Any]
) -> Method:
    rows, columns = numbers.shape
    step = 16
    target, wide = torch.empty((rows, columns), dtype=torch.bfloat16), torch.empty((step, columns))
    codes, factor = numbers.view(torch.float8_e4m3fn), torch.empty(columns)

    def run() -> torch.Tensor:
        for first in range(0, rows, step):
            convert(wide, codes[first : first + step])
            factor.view(-1, BLOCK).copy_(scales[first // BLOCK].unsqueeze(1))
            target[first : first + step].copy_(wide.mul_(factor))
        return target

    return run


def copies(like: torch.Tensor) -> dict[str, Method]:
    """Copies of as many bytes as `like` has: the least that a restored weight in memory takes."""
    source, target = in_slot(like), in_slot(like)
    near, place = torch.zeros(2, CACHED, dtype=like.dtype)

    def cached() -> torch.Tensor:
        for _ in range(like.numel() // CACHED):
            place.copy_(near)
        return place

    return {"a copy": lambda: target.copy_(source), "a copy in the second cache": cached}


def rows(weight: str, methods: dict[str, Method], turns: int) -> Iterator[dict[str, Any]]:
    expected = methods["Transformers"]().contiguous()
    for name, method in methods.items():
        if not torch.equal(method().view(torch.uint8), expected.view(torch.uint8)):
            raise SystemExit(f"{weight}, {name}: other bits than Transformers'")
    seconds = in_turns(methods | copies(expected), turns)
    for name, took in seconds.items():
        faster = [a / b for a, b in zip(seconds[TORCH], took, strict=True)]
        yield {
            "weight": weight,
            "method": name,
            "gb_per_s": expected.nbytes / min(took) / 1e9,
            "median_gb_per_s": expected.nbytes / statistics.median(took) / 1e9,
            "over_torch": statistics.median(faster),
        }


def in_turns(methods: dict[str, Method], turns: int) -> dict[str, list[float]]:
    """Processor seconds of each method, in alternated turns."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(turns):
        for name, method in methods.items():
            start = time.thread_time()
            method()
            seconds[name].append(time.thread_time() - start)
    return seconds


def product_methods(weight: str, methods: dict[str, Method]) -> dict[str, Method]:
    """One row times a weight that is in memory, and one that is restored first or not at all."""
    held = in_slot(methods["Transformers"]().contiguous())
    transposed = weight in MXFP4_SHAPES
    row = torch.randn(1, held.shape[0 if transposed else 1]).to(held.dtype)

    def product(restored: torch.Tensor) -> torch.Tensor:
        return row @ restored if transposed else EXACT(row, restored)

    found = {
        "dequantised": lambda: product(held),
        "restored by torch": lambda: product(methods[TORCH]()),
        "restored by the routine": lambda: product(methods["compiled"]()),
    }
    if transposed and are_possible(Mxfp4(), held.dtype, "cpu"):
        numbers, scales = mxfp4_numbers(MXFP4_SHAPES[weight])
        (codes,), (grid,) = Mxfp4().encode(numbers, scales)
        codes, scratch = in_slot(codes), torch.empty(1, PRODUCT_SCRATCH, dtype=torch.uint8)
        found["not restored"] = lambda: multiply(row, codes, grid, scratch)
    return found


def product_rows(weight: str, methods: dict[str, Method], turns: int) -> Iterator[dict[str, Any]]:
    expected = methods["dequantised"]()
    for name, method in methods.items():
        if not torch.equal(method(), expected):
            raise SystemExit(f"{weight}, {name}: another product than the dequantised weight's")
    seconds = in_turns(methods, turns)
    for name, took in seconds.items():
        ratios = [a / b for a, b in zip(took, seconds["dequantised"], strict=True)]
        yield {
            "weight": weight,
            "method": name,
            "ms": 1e3 * min(took),
            "median_ms": 1e3 * statistics.median(took),
            "over_dequantised": statistics.median(ratios),
        }


def operations(weight: str, method: Method) -> Iterator[dict[str, Any]]:
    """The operations of the torch way that take 2 % or more of its time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(5):
            method()
    found = profile.key_averages()
    whole = sum(one.self_cpu_time_total for one in found)
    for one in sorted(found, key=lambda one: -one.self_cpu_time_total):
        if one.self_cpu_time_total >= 0.02 * whole:
            yield {"weight": weight, "operation": one.key, "share": one.self_cpu_time_total / whole}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--turns", type=positive, default=15, help="measurements of each method")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    header("Restoring an expert, by method")
    weights = {name: mxfp4_methods(shape) for name, shape in MXFP4_SHAPES.items()}
    weights |= {name: fp8_methods(shape) for name, shape in FP8_SHAPES.items()}
    found = [row for name, methods in weights.items() for row in rows(name, methods, args.turns)]
    products = [
        row
        for name, methods in weights.items()
        for row in product_rows(name, product_methods(name, methods), args.turns)
    ]
    shares = [row for name, methods in weights.items() for row in operations(name, methods[TORCH])]
    print(f"{text_table(COLUMNS, found)}\n\n{text_table(OPERATIONS, shares)}\n\n{text_table(PRODUCTS, products)}")
    print(f"\n{save_rows('restoring', [*found, *shares, *products])}")


if __name__ == "__main__":
    main()
