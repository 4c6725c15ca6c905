"""Products with one weight on this CPU: torch's, and those of this project, in turns, as ratios of medians.

.venv/bin/python -m scripts.measure.products            # a minute
.venv/bin/python -m scripts.measure.products --quick    # fewer turns

`exact`: a weight [in, out] in bfloat16 by `checkpoint.inputs_first`, and MXFP4 that is not restored, beside torch; only
where they have torch's bits. `fast`: rows of bfloat16 by tiles in float32, and few rows with codes, beside the weight
that is restored and multiplied by torch; a single row's attention beside torch's. Widths are those of Qwen3-30B-A3B's
experts, and of gpt-oss-20b's for [in, out]. Codes are not in the cache when they are multiplied.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from checkpoint import float_tiles, inputs_first
from checkpoint.kernels import is_faster
from checkpoint.native import products
from checkpoint.native.encoding import CODES, SCALES, Encoding, Parts
from checkpoint.native.encodings import ENCODINGS, INTEGERS, MXFP4
from checkpoint.native.integers import packed_rows
from checkpoint.native.row_products import RowScratch, row_products
from checkpoint.row_attention import attend
from odmoe.clusters.process import prepare_libraries
from scripts.lib.flags import positive, script_parser
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, Row, text_table

QWEN, GPT_OSS = (1536, 2048), (2880, 5760)
"""[out, in] of a gate and up projection; [in, out] of one."""
HEADS, KEY_HEADS, HEAD = 32, 4, 128
OWN_KEYS, LONG = 16, 8192
"""Heads of a model with as many key heads, and tokens of a long cache."""
COLD_BYTES = 1 << 27
"""Weights that are multiplied in turn: more than the caches hold."""

Run = Callable[[], object]


def restored(encoding: Encoding, shape: tuple[int, int], parts: Parts, target: torch.Tensor) -> None:
    scratch = torch.empty(encoding.scratch_for([shape], "cpu", torch.get_num_threads()), dtype=torch.uint8)
    encoding.restore_into({"weight": target}, {f"weight.{name}": part for name, part in parts.items()}, scratch)


def integers(bits: int) -> Parts:
    rows, columns = QWEN
    numbers = torch.randint(0, 1 << bits, QWEN, dtype=torch.uint8)
    return {CODES: packed_rows(numbers, bits), SCALES: (torch.rand(rows, columns // 64) * 0.02).half()}


def mxfp4() -> Parts:
    inputs, outputs = GPT_OSS
    codes = torch.randint(0, 256, (inputs * outputs // 2,), dtype=torch.uint8)
    return {CODES: codes, SCALES: torch.randint(110, 124, (inputs // 32, outputs), dtype=torch.uint8)}


def cold(made: Callable[[], Parts]) -> list[Parts]:
    first = made()
    count = max(COLD_BYTES // sum(part.nbytes for part in first.values()), 1)
    return [{name: part.clone() for name, part in first.items()} for _ in range(count)]


def codes(name: str, made: Callable[[], Parts], count: int) -> tuple[Run, Run]:
    """Few rows: the restored weight, and its codes."""
    encoding, weights, scratch = ENCODINGS[name], cold(made), RowScratch()
    shape = GPT_OSS if encoding.inputs_first else QWEN
    rows = torch.randn(count, shape[0] if encoding.inputs_first else shape[1]).bfloat16()
    bound = [row_products(encoding, shape, parts, torch.bfloat16, scratch) for parts in weights]
    target, turns, others = torch.empty(shape, dtype=torch.bfloat16), itertools.cycle(weights), itertools.cycle(bound)

    def before() -> None:
        restored(encoding, shape, next(turns), target)
        _ = rows @ target if encoding.inputs_first else functional.linear(rows, target)

    def after() -> None:
        if (product := next(others)) is not None:
            product(rows)

    return before, after


def exact_mxfp4() -> tuple[Run, Run]:
    weights, target = cold(mxfp4), torch.empty(GPT_OSS, dtype=torch.bfloat16)
    scratch = torch.empty(ENCODINGS[MXFP4].scratch_for([GPT_OSS], "cpu", torch.get_num_threads()), dtype=torch.uint8)
    if not products.is_equal(GPT_OSS, scratch):
        raise SystemExit("the product with MXFP4 does not have torch's bits on this CPU")
    row, turns, others = torch.randn(1, GPT_OSS[0]).bfloat16(), itertools.cycle(weights), itertools.cycle(weights)

    def before() -> None:
        restored(ENCODINGS[MXFP4], GPT_OSS, next(turns), target)
        _ = row @ target

    def after() -> None:
        parts = next(others)
        products.multiply(row, parts[CODES], parts[SCALES], scratch)

    return before, after


def exact_inputs_first(count: int) -> tuple[Run, Run]:
    weight, rows = torch.randn(GPT_OSS).bfloat16(), torch.randn(count, GPT_OSS[0]).bfloat16()
    if not inputs_first.has_products(weight):
        raise SystemExit("torch multiplies weights [in, out] fast on this CPU, or in another order")
    return (lambda: rows @ weight), partial(inputs_first.multiply, rows, weight)


def tiles(count: int) -> tuple[Run, Run]:
    weight, rows = torch.randn(QWEN).bfloat16(), torch.randn(count, QWEN[1]).bfloat16()
    return partial(functional.linear, rows, weight), partial(float_tiles.multiply, rows, weight)


def attention(length: int, heads: int = HEADS, key_heads: int = KEY_HEADS) -> tuple[Run, Run]:
    """One row, by default of Qwen3-30B-A3B's heads, with so many tokens in the cache."""
    module: Any = SimpleNamespace(num_key_value_groups=heads // key_heads)
    query = torch.randn(1, heads, 1, HEAD).bfloat16()
    key, value = (torch.randn(1, key_heads, length, HEAD).bfloat16() for _ in range(2))
    return partial(sdpa_attention_forward, module, query, key, value, None), partial(
        attend, module, query, key, value, None
    )


def cases(quick: bool) -> dict[str, Callable[[], tuple[Run, Run]]]:
    found: dict[str, Callable[[], tuple[Run, Run]]] = {}
    for count in (1, 8, 32):
        found[f"fast, 4 bits, rows {count}"] = partial(codes, INTEGERS, partial(integers, 4), count)
    found["fast, 8 bits, rows 1"] = partial(codes, INTEGERS, partial(integers, 8), 1)
    found["fast, MXFP4, rows 1"] = partial(codes, MXFP4, mxfp4, 1)
    if not is_faster():
        for length in (64, 512, LONG):
            found[f"fast, attention, tokens {length}"] = partial(attention, length)
        found[f"fast, attention, tokens {LONG}, own keys"] = partial(attention, LONG, OWN_KEYS, OWN_KEYS)
    if float_tiles.is_faster():
        for count in (8, 128):
            found[f"fast, bfloat16, rows {count}"] = partial(tiles, count)
        for count in (1,) if quick else (1, 8, 32):
            found[f"exact, [in, out], rows {count}"] = partial(exact_inputs_first, count)
        found["exact, MXFP4, rows 1"] = exact_mxfp4
    return found


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured(before: Run, after: Run, turns: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the turns' ratios."""
    before(), after()
    pairs = [(seconds(before), seconds(after)) for _ in range(turns)]
    ratio = statistics.median(one / other for one, other in pairs)
    return statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs), ratio


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--threads", type=positive, default=1, help="of torch; %(default)s unless said")
    parser.add_argument("--quick", action="store_true", help="fewer turns, and fewer slow products of torch")
    args = parser.parse_args()
    header("Products with one weight")
    prepare_libraries(args.threads)
    rows: list[Row] = []
    with torch.inference_mode():
        for name, make in cases(args.quick).items():
            before, after, ratio = measured(*make(), 3 if args.quick else 15)
            rows.append({"product": name, "torch_ms": before * 1e3, "own_ms": after * 1e3, "ratio": ratio})
    columns = [Column("product", "product"), Column("torch, ms", "torch_ms", ".2f"), Column("own, ms", "own_ms", ".2f")]
    print(text_table([*columns, Column("times as fast", "ratio", ".1f")], rows))
    save_rows("products", rows)


if __name__ == "__main__":
    main()
