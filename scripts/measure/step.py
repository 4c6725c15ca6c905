"""Where the time of one decode step goes, and speed and first token beside Transformers `eager`, in turns in one run.

From the cluster's own trace: each layer's path through the expert that answered last. With --ops, also the host's
operations in the main node's thread, from torch.profiler (embedded only; it slows what it looks at).

    .venv/bin/python -m scripts.measure.step
    .venv/bin/python -m scripts.measure.step --cluster local --shadow none
    .venv/bin/python -m scripts.measure.step --system fully-cached --workers 1 --no-trace
"""

from __future__ import annotations

import bisect
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from odmoe.text import encode, load_tokenizer
from scheduler.trace import Span
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, Row, text_table
from wire.tracing import NodeSpans

PARTS = {
    "attention": "main node: attention, norms, gate",
    "decide": "main node: rows gathered, scheduler, messages sent",
    "out": "embedding on its way to the worker",
    "load": "worker: the load is waited for (stall)",
    "hand": "worker: hand-over between its threads",
    "compute": "worker: the expert computes",
    "back": "output on its way back, and the scheduler",
    "wake": "main node: woken up",
    "head": "main node: outputs added, head, next token",
}


class Eager:
    """Transformers alone, the same prompt and threads."""

    def __init__(self, model: str, dtype: str, ids: list[int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), experts_implementation="eager"
        )
        self._ids = torch.tensor([ids])

    def answer(self, count: int) -> tuple[float, float]:
        """(decode passes a second, prefill left out; seconds to the first token)."""
        torch = self._torch
        with torch.inference_mode():
            begun = time.perf_counter()
            out = self._model(self._ids, use_cache=True, logits_to_keep=1)
            start = time.perf_counter()
            for _ in range(count):
                token = out.logits[:, -1:].argmax(-1)
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        return count / (time.perf_counter() - start), start - begun


def paths(spans: list[Span]) -> list[dict[str, float]]:
    """One dictionary a decoded token: seconds by part of PARTS. The first token of the trace is prefill's."""
    tokens = [s for s in spans if s.what == "token"][1:]
    mains = [s for s in spans if s.row == "main"]
    out = [s for s in spans if s.what == "transfer" and " to #" in s.label]
    back = {s.label.partition("#")[2]: s for s in spans if s.what == "transfer" and s.label.startswith("from #")}
    work: dict[tuple[str, str, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.what in ("load", "compute"):
            work[span.row, span.what, span.label].append(span)
    found = []
    for token in tokens:
        inside = [s for s in mains if s.start >= token.start and s.end <= token.end]
        parts = dict.fromkeys(PARTS, 0.0)
        for span in inside:
            parts["attention"] += (span.end - span.start) if span.what == "layer" else 0.0
            parts["head"] += (span.end - span.start) if span.what == "head" else 0.0
        gates = {s.label: s for s in inside if s.what == "gate"}
        for wait in (s for s in inside if s.what == "wait"):
            _one_layer(parts, gates[wait.label], wait, out, back, work)
        found.append(parts)
    return found


def _one_layer(
    parts: dict[str, float],
    gate: Span,
    wait: Span,
    out: list[Span],
    back: dict[str, Span],
    work: dict[tuple[str, str, str], list[Span]],
) -> None:
    """The layer's path through the expert whose answer came last."""
    first = bisect.bisect_left(out, gate.start, key=lambda s: s.start)
    sent = (
        [s for s in out[first:] if s.start <= wait.end and s.label.startswith(f"{wait.label}.")]
        if first < len(out) and out[first].start <= wait.end
        else []
    )
    answered = [(back[s.label.partition("#")[2]], s) for s in sent if s.label.partition("#")[2] in back]
    answered = [pair for pair in answered if pair[0].end <= wait.end + 1e-3]
    if not answered:
        return
    answer, message = max(answered, key=lambda pair: pair[0].end)
    label = message.label.partition(" ")[0]
    compute = _last(work[message.row, "compute", label], answer.start)
    if compute is None:
        return
    load = _last(work[message.row, "load", label], compute.start)
    loaded = message.end if load is None else load.end  # None: it was resident before the trace began
    ready = max(loaded, message.end)
    parts["decide"] += message.start - gate.start
    parts["out"] += message.end - message.start
    parts["load"] += max(0.0, loaded - message.end)
    parts["hand"] += max(0.0, compute.start - ready)
    parts["compute"] += compute.end - compute.start
    parts["back"] += answer.end - compute.end
    parts["wake"] += wait.end - answer.end


def _last(spans: list[Span], before: float) -> Span | None:
    """The last of them that had begun by then; None where none had."""
    at = bisect.bisect_right([s.start for s in spans], before)
    return spans[at - 1] if at else None


COLUMNS = (
    Column("system", "system"),
    Column("cluster", "cluster"),
    Column("shadow", "shadow"),
    Column("loader", "loader"),
    Column("tokens/s", "tokens_per_s", ".1f"),
    Column("Transformers", "eager_tokens_per_s", ".1f"),
    Column("over Transformers", "ratio", ".2f"),
    Column("first token, ms", "ttft_s", ".1f", 1e3),
    Column("Transformers", "eager_ttft_s", ".1f", 1e3),
    Column("times as late", "ttft_ratio", ".2f"),
)


def _milliseconds(part: str) -> Callable[[Row], float | None]:
    return lambda row: row["ms"].get(part)


PATH = (
    *(Column(name, _milliseconds(part), ".2f") for part, name in PARTS.items()),
    Column("decoded tokens, of which these are medians", "traced_tokens", "d"),
    Column("records of the trace a token", "records", ".0f"),
    Column("their share of a step", "records_share", ".2%"),
    Column("tokens/s over Transformers", "ratio", ".2f"),
)
"""Of a traced run."""


def profile_ops(cluster: Any, ids: list[int], tokens: int) -> None:
    """The main thread's torch operations, and Python's share, from torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as made:
        list(cluster.generate(ids, tokens, ignore_eos=True))
    print(made.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=40))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--cluster", default="embedded")
    parser.add_argument("--system", default="od-moe")
    parser.add_argument("--shadow", default="none")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slots", type=int, help="1, or as the system needs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, help="a prompt of so many drawn tokens, in place of a problem")
    parser.add_argument("--loader", default="disk")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-trace", action="store_true", help="only tokens/s: what the trace costs")
    parser.add_argument("--ops", action="store_true", help="also torch.profiler's table")
    args = parser.parse_args()
    prepare_process()
    prepare_libraries(args.threads)
    header("One decode step")
    slots = {} if args.slots is None else {"slots": args.slots}
    settings = Settings(
        **slots,
        system=args.system,
        model=args.model,
        cluster=args.cluster,
        shadow=args.shadow,
        workers=args.workers,
        loader=args.loader,
        dtype=args.dtype,
        threads=args.threads,
        trace=None if args.no_trace else "kept in memory",
    )
    store = prepare_store(args.model, None, args.dtype)
    ids = encode(load_tokenizer(store.dense), gsm8k_prompts(1)[0], 1 << 30)
    if args.prompt_tokens:
        ids = random.Random(0).choices(ids, k=args.prompt_tokens)
    eager = Eager(args.model, args.dtype, ids)
    cluster = start_cluster(settings, store)
    rates: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    steps: list[dict[str, float]] = []
    records = 0
    try:
        list(cluster.generate(ids, 8, ignore_eos=True))
        cluster.trace()
        for _ in range(args.turns):
            theirs.append(eager.answer(args.tokens))
            *_, last = cluster.generate(ids, args.tokens, ignore_eos=True)
            rates.append((last.report.decode_tokens_per_s or 0.0, last.report.ttft_s))
            spans = cluster.trace()
            steps += paths(spans)
            records += sum(2 if span.what == "transfer" else 1 for span in spans)
        if args.ops and args.cluster == "embedded":
            profile_ops(cluster, ids, args.tokens)
    finally:
        cluster.close()
    row = {"system": args.system, "cluster": args.cluster, "shadow": args.shadow, "loader": args.loader}
    row |= speeds(rates, theirs)
    if steps:
        count = records / args.turns / args.tokens
        row |= {"records": count, "records_share": record_s() * count * row["tokens_per_s"]}
        row["traced_tokens"] = len(steps)
        row["ms"] = {part: statistics.median(step[part] for step in steps) * 1e3 for part in PARTS}
    print(text_table(COLUMNS, [row]))
    if steps:
        heads = Column("along the expert that answered last", "name"), Column("ms", "text", "")
        print(text_table(heads, [{"name": one.name, "text": one.text(row)} for one in PATH]))
    print(f"saved: {save_rows(f'step-{args.system}-{args.cluster}-{args.shadow}', [row])}")


def record_s(count: int = 200_000) -> float:
    """Seconds that one record of the trace costs."""
    record = NodeSpans(True, time.monotonic)
    start = time.perf_counter()
    for number in range(count):
        record.add("load", f"{number}.{number}", time.monotonic(), time.monotonic())
    return (time.perf_counter() - start) / count


def speeds(rates: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> dict[str, Any]:
    """Of (tokens/s, seconds to the first token) of each turn, ours and theirs: medians, and medians of the ratios."""
    found: dict[str, Any] = {}
    for which, name, ratio in ((0, "tokens_per_s", "ratio"), (1, "ttft_s", "ttft_ratio")):
        ours, others = [one[which] for one in rates], [one[which] for one in theirs]
        found |= {name: statistics.median(ours), f"eager_{name}": statistics.median(others)}
        found[ratio] = statistics.median(one / other for one, other in zip(ours, others, strict=True))
    return found


if __name__ == "__main__":
    main()
