"""Tokens and logits beside Transformers `eager`, as `odmoe verify` compares them, over many settings and prompts.

.venv/bin/python -m scripts.measure.exactness                 # settings varied one by one, embedded: some minutes
.venv/bin/python -m scripts.measure.exactness --cluster local # the same tokens from Ray actors over gRPC
.venv/bin/python -m scripts.measure.exactness --full          # every combination: an hour or two
.venv/bin/python -m scripts.measure.exactness --requests 1 3 8  # so many at once, with every shadow, 1 and 2 slots
.venv/bin/python -m scripts.measure.exactness --requests 1 3 8 --drafts 1 4 8 auto  # and so many drafts: an hour or two
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.commands.shared.comparison import Answer, compare
from odmoe.commands.shared.whole_model import load_whole
from odmoe.commands.verify import answer, reference
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from odmoe.text import encode, load_tokenizer
from scheduler.drafts.length import AUTO, MOST_ROWS
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows
from scripts.lib.simultaneous import compared_together
from scripts.lib.tables import Column, text_table

DRAFTS_S = 0.05
"""How long a pass waits for one more draft."""


def variations(base: Settings, full: bool) -> Iterator[Settings]:
    """The base and one change at a time; or every combination."""
    axes: dict[str, list[Any]] = {
        "slots": [1, 2],
        "shadow": ["int8", "nf4", "fp16", "none"],
        "workers": [8, 1, 3, 12],
        "periods": [1, 4, 0],
        "loader": ["disk", "memory"],
        "mini_batch": [1024, 32],
    }
    if full:
        combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    else:
        first = {name: values[0] for name, values in axes.items()}
        combinations = [first] + [{**first, n: v} for n, values in axes.items() for v in values[1:]]
    for combination in combinations:
        period = combination.pop("periods")
        yield base.replace(**combination, align_token=period, align_kv=period)


def several(base: Settings, drafts: list[str]) -> Iterator[Settings]:
    """Every shadow with one and two slots, and each number of drafts; without a shadow they come from the prompt. Rows
    are not split, so that logits are comparable bit for bit."""
    for draft, shadow, slots in itertools.product(drafts, ["int8", "nf4", "fp16", "none"], [1, 2]):
        source = "prompt" if shadow == "none" else "shadow"
        yield base.replace(shadow=shadow, slots=slots, mini_batch=4096, draft=draft, draft_from=source)


def wait_for_drafts(drafting: Any, most: int) -> None:
    """Have each pass wait for drafts, up to `most`, as long as more of them come: two cores that compute a main model
    and a shadow at the same time have hardly any, and blocks of one token say nothing about drafts."""
    take = drafting.take

    def patient(request: int, rows: int) -> Any:
        count, wanted, end = -1, min(most, rows - 1), time.monotonic() + DRAFTS_S
        while (now := drafting.available(request)) < wanted and (now > count or time.monotonic() < end):
            if now > count:
                count, end = now, time.monotonic() + DRAFTS_S
            time.sleep(0.001)
        return take(request, rows)

    drafting.take = patient


def measure(
    settings: Settings, store: Any, answers: list[tuple[list[int], Answer]], count: int, requests: int
) -> dict[str, Any]:
    """Every prompt on one cluster of these settings, `requests` at once."""
    cluster: Any = start_cluster(settings, store)
    prompts = [prompt for prompt, _ in answers]
    if settings.draft and settings.has_shadow:
        wait_for_drafts(cluster.main.drafting, MOST_ROWS - 1 if settings.draft == AUTO else int(settings.draft))
    try:
        if requests == 1:
            found = [answer(cluster, prompt, count) for prompt in prompts]
        else:
            groups = [prompts[at : at + requests] for at in range(0, len(prompts), requests)]
            found = [one for group in groups for one in compared_together(cluster, group, count)]
    finally:
        cluster.close()
    compared = [
        compare(got, wanted, store.manifest.dtype) for (got, _), (_, wanted) in zip(found, answers, strict=True)
    ]
    for (prompt, _), one in zip(answers, compared, strict=True):
        if one.difference is not None:
            print(f"  differs: prompt of {len(prompt)} tokens, {one.difference}", flush=True)
    reports = [report for _, report in found]
    recalls = [report.recall for report in reports if report.recall is not None]
    return {
        "tokens": count * len(answers),
        "equal_tokens": sum(one.equal_tokens for one in compared),
        "bit_equal_logits": sum(one.bit_equal_logits for one in compared) if compared[0].logits else None,
        "near_ties": sum(one.difference is not None and one.difference.near_tie for one in compared),
        "residents": max(max(report.resident_experts_max) for report in reports),
        "recall": sum(recalls) / len(recalls) if recalls else None,
        "drafted": sum(report.drafted for report in reports),
        "accepted": sum(report.accepted for report in reports),
        "requests_per_step": sum(report.requests_per_step for report in reports) / len(reports),
        "memory_bytes": reports[-1].memory_bytes,
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cluster", default="embedded")
    parser.add_argument("--full", action="store_true", help="every combination")
    parser.add_argument("--requests", type=int, nargs="+", help="so many at once, for each shadow and number of slots")
    parser.add_argument("--drafts", nargs="+", default=["0"], metavar="N", help="of a block, with --requests (0)")
    parser.add_argument("--first", type=int, help="only so many settings, the base first")
    args = parser.parse_args()
    if args.requests and args.cluster != "embedded":
        parser.error("--requests compares logits, which only an embedded cluster gives")
    prepare_process()
    threads = Settings(model=args.model).threads_a_node  # of Transformers, too: last bits depend on it
    prepare_libraries(threads)
    header("Tokens and logits against Transformers eager")
    rows: list[dict[str, Any]] = []
    bad = 0
    with Progress(console=Console(stderr=True)) as bars:
        for dtype in args.dtype:
            store = prepare_store(args.model, None, dtype)
            tokenizer = load_tokenizer(store.dense)
            ids = [encode(tokenizer, text, 1024) for text in gsm8k_prompts(args.prompts)]
            model = load_whole(Path(args.model), dtype)
            answers = [(prompt, reference(model, prompt, args.tokens)) for prompt in ids]
            whole = sum(p.nbytes for p in model.parameters())
            del model
            base = Settings(model=args.model, dtype=dtype, cluster=args.cluster, threads=threads)
            settings = list(several(base, args.drafts) if args.requests else variations(base, args.full))[: args.first]
            runs = [(one, requests) for requests in args.requests or [1] for one in settings]
            task = bars.add_task(dtype, total=len(runs))
            for one, requests in runs:
                row = {
                    "dtype": dtype,
                    "workers": one.workers,
                    "slots": one.slots,
                    "shadow": one.shadow,
                    "period": one.align_token,
                    "loader": one.loader,
                    "mini_batch": one.mini_batch,
                    "requests": requests,
                    "draft": str(one.draft),
                    **measure(one, store, answers, args.tokens, requests),
                }
                memory = row["memory_bytes"]
                row["of_whole"] = (memory["main"] + memory["shadow"] + sum(memory["workers"])) / whole
                rows.append(row)
                bad += row["equal_tokens"] != row["tokens"]
                bars.advance(task)
    name = f"exactness-{args.cluster}"
    print(text_table(COLUMNS, rows))
    print(f"\n{len(rows)} settings, {bad} with a token that differs; written to {save_rows(name, rows)}")
    sys.exit(bool(bad))


COLUMNS = (
    Column("dtype", "dtype"),
    Column("workers", "workers", "d"),
    Column("slots", "slots", "d"),
    Column("shadow", "shadow"),
    Column("aligned every", "period", "d"),
    Column("loader", "loader"),
    Column("mini-batch", "mini_batch"),
    Column("requests", "requests", "d"),
    Column("a step", "requests_per_step", ".1f"),
    Column("drafts", "draft"),
    Column("right", "accepted", "d"),
    Column("of", "drafted", "d"),
    Column("tokens equal", lambda row: f"{row['equal_tokens']} of {row['tokens']}"),
    Column("logits bit for bit", "bit_equal_logits", "d"),
    Column("near ties", "near_ties", "d"),
    Column("recall", "recall", ".2%"),
    Column("most resident experts", "residents", "d"),
    Column("memory of all experts cached", "of_whole", ".0%"),
)


if __name__ == "__main__":
    main()
