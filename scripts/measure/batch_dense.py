"""What it gains to compute the rows of several requests together, and what it costs in exactness.

First the speed of the dense part alone: experts return their input, so that attention, norms, gates and the LM head are
all that is computed. Steps of one token each of n requests, in four ways that take turns: `own`, a forward pass of
each request; `batched`, the same passes as coroutines that meet at each linear layer; `exact`, as batched, but they
share a product only where that changes no bit; `padded`, one forward pass of Transformers over a batch of prompts of
one length, which is the most that batching could gain. Ratios are medians over the turns.

Then exactness, with experts: eight requests answer a text that is forced, on their own and in both ways of batching.
Listed are logits and argmax that differ, and near ties: tokens whose two best logits are as close as the largest
difference.

Last, one expert and one row of each request: a computation for each, and one for all; and whether workers share it,
which they do where every bit stays.

    .venv/bin/python -m scripts.measure.batch_dense --quick

One thread is timed by its processor time, several by the clock. `qwen3` and `mixtral` are random, with the widths of
Qwen3-30B-A3B and Mixtral-8x7B, fewer layers, and a vocabulary that is smaller by as much.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from checkpoint import family
from checkpoint.coroutine import Coroutine
from checkpoint.expert import ExpertArithmetic
from checkpoint.kernels import EXACT
from checkpoint.linear_batch import batch_linear, run_together
from checkpoint.tensors import aligned_buffer
from odmoe.clusters.process import prepare_libraries, prepare_process
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEEP, DEMO
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table

_COMMON = {"tie_word_embeddings": False, "max_position_embeddings": 2048, "sliding_window": None}
RANDOM: dict[str, dict[str, Any]] = {
    "qwen3": _COMMON
    | {"model_type": "qwen3_moe", "vocab_size": 16384, "hidden_size": 2048, "num_hidden_layers": 6, "head_dim": 128}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    "mixtral": _COMMON
    | {"model_type": "mixtral", "vocab_size": 4096, "hidden_size": 4096, "num_hidden_layers": 4, "head_dim": 128}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
}
TRAINED = {"demo-moe": DEMO, "deep-moe": DEEP}
EMPTY, SMALL = {"moe_intermediate_size": 1, "intermediate_size": 1}, {"moe_intermediate_size": 64}
"""The inner width of experts that do not compute, and of those that do."""
PROMPT_TOKENS = 64
EXACT_REQUESTS = 8
EXPERT_SHAPES = ((192, 288), (2048, 768), (2048, 3584), (4096, 14336))
"""Hidden and inner width of an expert: of models/demo-moe, Qwen3-30B-A3B, in between, Mixtral-8x7B."""
EXPERTS_BYTES, TURN_BYTES, PIECE, MOST_EXPERTS = 1 << 30, 1 << 28, 1 << 18, 64
Step = Callable[[list[Any], torch.Tensor], list[torch.Tensor]]
"""(caches, next tokens [n]) -> logits [V] of each request."""


def make_model(name: str, dtype: torch.dtype, experts: bool) -> Any:
    """A model for batching, with its experts or with experts that return their input."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if name in TRAINED:
        model = AutoModelForCausalLM.from_pretrained(TRAINED[name], dtype=dtype)
    else:
        torch.manual_seed(0)
        fields = RANDOM[name] | (SMALL | {"intermediate_size": 64} if experts else EMPTY)
        model = AutoModelForCausalLM.from_config(family.config_from_dict(fields), dtype=dtype)
    ALL_EXPERTS_FUNCTIONS.register("identity", lambda module, hidden, *_: hidden)
    model.set_experts_implementation("eager" if experts else "identity")
    EXACT.replace_in(model)
    batch_linear(model)
    return model.eval()


def prompts(name: str, count: int, tokens: int) -> torch.Tensor:
    """[count, tokens]"""
    if name in TRAINED:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(TRAINED[name])
        return torch.tensor(prompts_of_length(tokenizer, count, tokens))
    words = RANDOM[name]["vocab_size"]
    return torch.randint(words, (count, tokens), generator=torch.Generator().manual_seed(0))


def forward(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[n, T] -> logits [n, V] of the last position."""
    out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = out.logits[:, -1]
    return logits


def own(model: Any, caches: list[Any], tokens: torch.Tensor) -> list[torch.Tensor]:
    return [forward(model, cache, token.view(1, 1))[0] for cache, token in zip(caches, tokens, strict=True)]


def batched(model: Any, caches: list[Any], tokens: torch.Tensor, exact: bool = False) -> list[torch.Tensor]:
    def one(cache: Any, token: torch.Tensor) -> torch.Tensor:
        return forward(model, cache, token.view(1, 1))[0]

    passes = [Coroutine(functools.partial(one, *both)) for both in zip(caches, tokens, strict=True)]
    return run_together(passes, exact)


def padded(model: Any, caches: list[Any], tokens: torch.Tensor) -> list[torch.Tensor]:
    """`caches`: one for all."""
    return list(forward(model, caches[0], tokens.unsqueeze(1)))


WAYS: dict[str, Callable[[Any, list[Any], torch.Tensor], list[torch.Tensor]]] = {
    "own": own,
    "batched": batched,
    "exact": functools.partial(batched, exact=True),
    "padded": padded,
}
COMPARED = ("batched", "exact")


def speed(model: Any, text: torch.Tensor, turns: int, steps: int) -> dict[str, float]:
    """Of text [n, T], one token of each row a step: milliseconds of a step in each way, and ratios to `own`."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    given, following = text[:, :PROMPT_TOKENS], text[:, PROMPT_TOKENS : PROMPT_TOKENS + steps]
    caches: dict[str, list[Any]] = {}
    for way in WAYS:
        groups = [given] if way == "padded" else given.split(1)
        caches[way] = [family.new_cache(model.config) for _ in groups]
        for cache, rows in zip(caches[way], groups, strict=True):
            forward(model, cache, rows)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way in list(WAYS) if turn % 2 else reversed(WAYS):
            start = clock()
            for tokens in following.unbind(1):
                WAYS[way](model, caches[way], tokens)
            if turn:  # the first one warms up
                seconds[way].append((clock() - start) / steps)
            for cache in caches[way]:
                cache.crop(-steps)
    ratios = {
        f"{way}_over_own": statistics.median(a / b for a, b in zip(seconds["own"], seconds[way], strict=True))
        for way in ("batched", "exact", "padded")
    }
    return {way: statistics.median(of) * 1e3 for way, of in seconds.items()} | ratios


def exactness(model: Any, text: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Of text [n, T], whose tokens after the prompt are forced: how logits of batched passes differ from own ones."""
    logits: dict[str, torch.Tensor] = {}
    for way in ("own", *COMPARED):
        caches = [family.new_cache(model.config) for _ in text]
        for cache, rows in zip(caches, text[:, :PROMPT_TOKENS].split(1), strict=True):
            forward(model, cache, rows)
        passes = [torch.stack(WAYS[way](model, caches, tokens)) for tokens in text[:, PROMPT_TOKENS:].unbind(1)]
        logits[way] = torch.stack(passes, 1).float()  # [n, T, V]
    wanted = logits["own"]
    best = wanted.topk(2, -1).values
    for way in COMPARED:
        got = logits[way]
        difference = (got - wanted).abs().amax(-1)
        other = got.argmax(-1) != wanted.argmax(-1)
        yield {
            "way": way,
            "tokens": other.numel(),
            "equal_logits": float((got == wanted).float().mean()),
            "median_difference": float(difference.median()),
            "largest_difference": float(difference.max()),
            "deviation": float(wanted.std()),
            "near_ties": int((best[..., 0] - best[..., 1] <= difference.max()).sum()),
            "other_argmax": int(other.sum()),
            "other_answers": int(other.any(1).sum()),
        }


def expert_speed(hidden: int, inner: int, dtype: str, count: int, turns: int) -> dict[str, Any]:
    """Milliseconds of an expert [2 x inner, hidden] and [hidden, inner], of which several stand in memory in turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    config = RANDOM["mixtral"] | {"hidden_size": hidden, "intermediate_size": inner}
    arithmetic = ExpertArithmetic(family.config_from_dict(config).to_dict(), dtype)
    size, kind = 3 * hidden * inner, family.parse_dtype(dtype)
    memory = aligned_buffer(max(EXPERTS_BYTES, size * kind.itemsize)).view(kind)
    memory[: memory.numel() // PIECE * PIECE].view(-1, PIECE)[:] = (torch.randn(PIECE) / 50).to(kind)
    experts = memory[: memory.numel() // size * size].view(-1, size).unbind()[:MOST_EXPERTS]
    views = [
        {
            "gate_up_proj": one[: size // 3 * 2].view(2 * inner, hidden),
            "down_proj": one[size // 3 * 2 :].view(hidden, inner),
        }
        for one in experts
    ]
    bound = [arithmetic.bind(0, one) for one in views]
    rows, weights = torch.randn(count, hidden).to(kind), torch.rand(count).to(kind)
    own_rows = [(row.clone(), weight.clone()) for row, weight in zip(rows.split(1), weights.split(1), strict=True)]
    a_turn, done = max(1, TURN_BYTES // (size * kind.itemsize)), 0
    seconds: dict[str, list[float]] = {"own": [], "shared": []}
    for turn in range(turns + 1):
        for way in ("own", "shared") if turn % 2 else ("shared", "own"):
            start = clock()
            for number in range(done, done + a_turn):
                for given in own_rows if way == "own" else [(rows, weights)]:
                    bound[number % len(bound)](*given)
            if turn:
                seconds[way].append((clock() - start) / a_turn)
            done += a_turn
    ratio = statistics.median(a / b for a, b in zip(seconds["own"], seconds["shared"], strict=True))
    medians = {way: statistics.median(of) * 1e3 for way, of in seconds.items()}
    facts = {"part": "experts", "hidden": hidden, "inner": inner, "dtype": dtype, "threads": torch.get_num_threads()}
    facts |= {"requests": count, "shared_over_own": ratio, "shares": arithmetic.is_rowwise(0, views[0])}
    return facts | medians


SPEED = (
    Column("model", "model"),
    Column("dtype", "dtype"),
    Column("threads", "threads", "d"),
    Column("requests", "requests", "d"),
    Column("own ms", "own", ".2f"),
    Column("batched ms", "batched", ".2f"),
    Column("exact ms", "exact", ".2f"),
    Column("padded ms", "padded", ".2f"),
    Column("batched over own", "batched_over_own", ".2f"),
    Column("exact over own", "exact_over_own", ".2f"),
    Column("padded over own", "padded_over_own", ".2f"),
)
EXACTNESS = (
    Column("model", "model"),
    Column("dtype", "dtype"),
    Column("threads", "threads", "d"),
    Column("way", "way"),
    Column("tokens", "tokens", "d"),
    Column("equal logits", "equal_logits", ".3f"),
    Column("median difference", "median_difference", ".1e"),
    Column("largest", "largest_difference", ".1e"),
    Column("deviation of logits", "deviation", ".2f"),
    Column("near ties", "near_ties", "d"),
    Column("other argmax", "other_argmax", "d"),
    Column("other answers of 8", "other_answers", "d"),
)
EXPERTS = (
    Column("hidden", "hidden", "d"),
    Column("inner", "inner", "d"),
    Column("dtype", "dtype"),
    Column("threads", "threads", "d"),
    Column("requests", "requests", "d"),
    Column("own ms", "own", ".2f"),
    Column("shared ms", "shared", ".2f"),
    Column("shared over own", "shared_over_own", ".2f"),
    Column("workers share", "shares"),
)
TABLES = {"speed": SPEED, "exactness": EXACTNESS, "experts": EXPERTS}
"""Part of the script -> its table."""


def measure(args: argparse.Namespace, name: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Rows of the parts `speed` and `exactness`."""
    for part in [one for one in ("speed", "exactness") if one in args.parts]:
        experts = part == "exactness"
        model = make_model(name, getattr(torch, dtype), experts)
        for threads in args.threads:
            torch.set_num_threads(threads)
            facts = {"part": part, "model": name, "dtype": dtype, "threads": threads}
            print(name, dtype, f"{threads} threads, {part}", file=sys.stderr, flush=True)
            if experts:
                text = prompts(name, EXACT_REQUESTS, PROMPT_TOKENS + args.tokens)
                yield from (facts | row for row in exactness(model, text))
                continue
            for count in args.requests:
                text = prompts(name, count, PROMPT_TOKENS + args.steps)
                yield facts | {"requests": count} | speed(model, text, args.turns, args.steps)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    names = [*TRAINED, *RANDOM]
    parser.add_argument(
        "--models", nargs="*", default=names, choices=names, metavar="MODEL", help=f"({' '.join(names)})"
    )
    parser.add_argument("--parts", nargs="+", choices=TABLES, default=list(TABLES), help=f"({' '.join(TABLES)})")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--requests", type=positive, nargs="+", help="at once (1 2 4 8 16; --quick: 1 8)")
    parser.add_argument("--steps", type=positive, default=4, help="of a turn (%(default)s)")
    parser.add_argument("--turns", type=positive, help="(9; --quick: 3)")
    parser.add_argument("--tokens", type=positive, help="of each request, compared (64; --quick: 16)")
    parser.add_argument("--quick", action="store_true", help="fewer requests, turns and tokens")
    args = parser.parse_args()
    if unknown := set(args.models) - set(names):
        parser.error(f"--models: {', '.join(sorted(unknown))}; allowed: {', '.join(names)}")
    args.requests = args.requests or ([1, 8] if args.quick else [1, 2, 4, 8, 16])
    args.turns = args.turns or (3 if args.quick else 9)
    args.tokens = args.tokens or (16 if args.quick else 64)
    return args


def main() -> int:
    args = parse()
    prepare_process()
    prepare_libraries(args.threads[0])
    header("The dense part of several requests at once")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in args.models:
            for dtype in args.dtypes:
                rows += measure(args, name, dtype)
        for threads in args.threads if "experts" in args.parts else []:
            torch.set_num_threads(threads)
            for dtype, shape in itertools.product(args.dtypes, EXPERT_SHAPES[:2] if args.quick else EXPERT_SHAPES):
                print(f"experts {shape}, {dtype}, {threads} threads", file=sys.stderr, flush=True)
                rows += [expert_speed(*shape, dtype, count, args.turns) for count in args.requests if count > 1]
    for part in args.parts:
        print(f"{part}\n{text_table(TABLES[part], [row for row in rows if row['part'] == part])}\n")
    print(save_rows("batch-dense", rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
