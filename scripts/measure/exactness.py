"""Are the tokens, and the logits, those of Transformers `eager`? Every prompt, every setting, counted.

.venv/bin/python -m scripts.measure.exactness                 # settings varied one by one, embedded: some minutes
.venv/bin/python -m scripts.measure.exactness --cluster local # the same tokens from Ray actors over gRPC
.venv/bin/python -m scripts.measure.exactness --full          # every combination: an hour or two
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from checkpoint.family import parse_dtype
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from odmoe.text import encode, load_tokenizer
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows


@dataclass
class Answer:
    """Greedy tokens and the logits [V] float32 that chose each."""

    tokens: list[int]
    logits: list[torch.Tensor]


def reference(model: Any, prompt: list[int], count: int) -> Answer:
    """Transformers' own model, `eager` experts, its own cache; end of sequence is not heeded."""
    answer = Answer([], [])
    out = model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    while True:
        answer.logits.append(out.logits[0, -1].float())
        answer.tokens.append(int(answer.logits[-1].argmax()))
        if len(answer.tokens) == count:
            return answer
        last = torch.tensor([answer.tokens[-1:]])
        out = model(input_ids=last, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)


def variations(base: Settings, full: bool) -> Iterator[Settings]:
    """The base and one change at a time; or every combination."""
    axes: dict[str, list[Any]] = {
        "slots": [1, 2], "shadow": ["int8", "nf4", "fp16", "none"], "workers": [8, 1, 3, 12],
        "periods": [1, 4, 0], "loader": ["disk", "memory"], "mini_batch": [1024, 32],
    }  # fmt: skip
    if full:
        combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    else:
        first = {name: values[0] for name, values in axes.items()}
        combinations = [first] + [{**first, n: v} for n, values in axes.items() for v in values[1:]]
    for combination in combinations:
        period = combination.pop("periods")
        yield base.but(**combination, align_token=period, align_kv=period)


def compare(settings: Settings, store: Any, answers: list[tuple[list[int], Answer]], count: int) -> dict[str, Any]:
    """Every prompt on one cluster of these settings."""
    cluster: Any = start_cluster(settings, store)
    seen: list[torch.Tensor] = []
    embedded = settings.cluster == "embedded"
    if embedded:
        cluster.main.on_logits = seen.append
    row: dict[str, Any] = {
        "tokens": 0,
        "equal_tokens": 0,
        "bit_equal_logits": 0 if embedded else None,
        "near_ties": 0,
        "residents": 0,
    }
    recalls: list[float] = []
    try:
        for prompt, expected in answers:
            seen.clear()
            *_, last = cluster.generate(prompt, count, ignore_eos=True)
            row["tokens"] += count
            row["equal_tokens"] += sum(a == b for a, b in zip(last.report.token_ids, expected.tokens, strict=True))
            if embedded:  # elsewhere the logits stay on the main node
                row["bit_equal_logits"] += sum(torch.equal(a, b) for a, b in zip(seen, expected.logits, strict=True))
            difference = first_difference(last.report.token_ids, expected, store.manifest.dtype)
            if difference is not None:
                row["near_ties"] += difference["near_tie"]
                print(f"  differs: prompt of {len(prompt)} tokens, {difference}", flush=True)
            row["residents"] = max(row["residents"], *last.report.resident_experts_max)
            recalls += [last.report.recall] if last.report.recall is not None else []
            memory = last.report.memory_bytes
    finally:
        cluster.close()
    row["recall"] = sum(recalls) / len(recalls) if recalls else None
    row["memory_bytes"] = memory
    return row


def first_difference(tokens: list[int], expected: Answer, dtype: str) -> dict[str, Any] | None:
    """Where an answer leaves Transformers' own, and whether its two best logits are within rounding of each other.

    Within rounding: closer than four units in the last place of `dtype` at the best logit's size.
    """
    for position, (got, wanted) in enumerate(zip(tokens, expected.tokens, strict=True)):
        if got != wanted:
            best, second = expected.logits[position].topk(2).values.tolist()
            near = best - second <= 4 * torch.finfo(parse_dtype(dtype)).eps * abs(best)
            return {"token": position, "got": got, "wanted": wanted, "logits": [best, second], "near_tie": near}
    return None


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cluster", default="embedded")
    parser.add_argument("--full", action="store_true", help="every combination")
    parser.add_argument("--first", type=int, help="only so many settings, the base first")
    args = parser.parse_args()
    prepare_process()
    prepare_libraries(Settings(model=args.model).threads_a_node)
    header("Tokens and logits against Transformers eager")
    from transformers import AutoModelForCausalLM

    rows: list[dict[str, Any]] = []
    bad = 0
    with Progress(console=Console(stderr=True)) as bars:
        for dtype in args.dtype:
            store = prepare_store(args.model, None, dtype)
            tokenizer = load_tokenizer(store.dense)
            ids = [encode(tokenizer, text, 1024) for text in gsm8k_prompts(args.prompts)]
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, experts_implementation="eager")
            with torch.inference_mode():
                answers = [(prompt, reference(model, prompt, args.tokens)) for prompt in ids]
            whole = sum(p.nbytes for p in model.parameters())
            del model
            base = Settings(model=args.model, dtype=dtype, cluster=args.cluster)
            settings = list(variations(base, args.full))[: args.first]
            task = bars.add_task(dtype, total=len(settings))
            for one in settings:
                row = {
                    "dtype": dtype, "workers": one.workers, "slots": one.slots, "shadow": one.shadow,
                    "period": one.align_token, "loader": one.loader, "mini_batch": one.mini_batch,
                    **compare(one, store, answers, args.tokens),
                }  # fmt: skip
                memory = row["memory_bytes"]
                row["of_whole"] = (memory["main"] + memory["shadow"] + sum(memory["workers"])) / whole
                rows.append(row)
                bad += row["equal_tokens"] != row["tokens"]
                print(line(row), flush=True)
                bars.advance(task)
    name = f"exactness-{args.cluster}"
    print(f"\n{len(rows)} settings, {bad} with a token that differs; written to {save_rows(name, rows)}")
    sys.exit(bool(bad))


def line(row: dict[str, Any]) -> str:
    recall = "-" if row["recall"] is None else f"{row['recall']:.4f}"
    bits = "not seen" if row["bit_equal_logits"] is None else row["bit_equal_logits"]
    return (
        f"{row['dtype']:>8} workers {row['workers']:>2} slots {row['slots']} shadow {row['shadow']:>4} "
        f"period {row['period']} {row['loader']:>6} mini-batch {row['mini_batch']:>4}: "
        f"tokens {row['equal_tokens']}/{row['tokens']}, logits bit for bit {bits}, near ties {row['near_ties']}, "
        f"recall {recall}, residents {row['residents']}, memory {row['of_whole']:.2f} of all experts cached"
    )


if __name__ == "__main__":
    main()
