"""Does an emulated run take as long as the simulator says of the same routes? And as long as the paper's testbed?

    .venv/bin/python -m scripts.measure.agreement                          # embedded: all nodes in this process
    .venv/bin/python -m scripts.measure.agreement --cluster local          # a process a node
    .venv/bin/python -m scripts.measure.agreement --requests 8             # eight prompts at once, in one step
    .venv/bin/python -m scripts.measure.agreement --requests 8 --draft auto --batch-dense --profile rtx3090-1gbe@4

A warm-up, then prompts one at a time, recorded. The record is told to the simulator's scheduler once more (it must
decide the same, in order), and its routes and predictions are simulated with the profile's times. A ratio is what was
measured over what was simulated; the goal is 1.05 at most. TTFT is measured with prefill's work at once (`ahead`) and
one after the other (`in-turn`), on a cluster each.
With --requests N, N prompts are asked at once, and the time of a decode token is that of a request among them.
With --draft the shadow drafts: the simulator has the recorded drafts, right or wrong, and chooses its blocks itself.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from odmoe.settings.settings import Settings
from scheduler.alignment import AT_ONCE, LATE
from scheduler.drafts.length import AUTO
from scheduler.eventlog.recording import read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from scripts.lib.clusters import KeptCluster, answer, open_model
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, experiment_flags, parse_flags, positive
from scripts.lib.ledger import PACKAGES, sources
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header
from scripts.lib.recorded_runs import TOGETHER, compare, compare_together
from scripts.lib.simultaneous import answered_together
from scripts.lib.tables import Column, Row, text_table

VERSION = 1
GOAL = 1.05
PAPER_TOKENS_PER_S, PAPER_TTFT_S = 3.69, {16: 1.345, 128: 3.143}
WAYS = ("ahead", "in-turn")
BLOCKS = ("rows", "simulated_rows", "tokens_a_pass", "simulated_tokens_a_pass")
"""With drafts: of a pass that decodes."""


def prompts_of(args: Any, tokenizer: Any, way: str) -> list[tuple[list[int], int]]:
    """(prompt, tokens of its answer): a warm-up, then those whose decode counts, then those whose TTFT does."""
    short, long = (prompts_of_length(tokenizer, args.prompts + 1, n, args.seed) for n in (args.prompt_tokens, 128))
    decoded = [(prompt, args.tokens) for prompt in short[1:]] if way == "ahead" else [(p, 1) for p in short[1:]]
    return [(short[0], 4), *decoded, *((prompt, 1) for prompt in long[1:])]


def ask_here(kept: KeptCluster, settings: Settings, prompts: list[tuple[list[int], int]], path: Path) -> list[Any]:
    """(TTFT, decode seconds or None) of each prompt, from a new cluster of this machine; its recording at `path`."""
    cluster = kept.cluster(settings)
    reports = [answer(cluster, prompt, tokens) for prompt, tokens in prompts]
    write_whole(path, cluster.recording())
    kept.close()
    return [(report.ttft_s, report.decode_s if report.new_tokens > 1 else None) for report in reports]


def ask_together(kept: KeptCluster, settings: Settings, prompts: list[list[int]], tokens: int, path: Path) -> list[Any]:
    """As `ask_here`, after a warm-up with the first prompt, of all others at once."""
    cluster = kept.cluster(settings, warm=prompts[0])
    ends = answered_together(cluster, prompts[1:], tokens)
    write_whole(path, cluster.recording())
    kept.close()
    return [(of[0], of[-1] - of[0]) for of in ends]


class Measure:
    """Computes any cell."""

    def __init__(self, args: Any, tokenizer: Any, run: Experiment, kept: KeptCluster) -> None:
        self._args, self._tokenizer, self._run, self._kept = args, tokenizer, run, kept

    def __call__(self, params: dict[str, Any]) -> dict[str, Any]:
        path = Path(self._run.path(params, ".recording"))
        prompts = prompts_of(self._args, self._tokenizer, params["prefill"])
        settings = Settings(
            model=self._args.model,
            dtype="float32",
            cluster=self._args.cluster,
            profile=self._args.profile,
            prefill=params["prefill"],
            mini_batch=self._args.mini_batch,
            record=str(path),
            threads=1,
            shadow=self._args.shadow,
            parallel=max(8, self._args.requests),
            batch_dense=self._args.batch_dense,
            departure=params["departure"],
            slots=params["slots"],
            **({"draft": params["draft"]} if params["draft"] else {}),
        )
        if (count := params["requests"]) > 1:
            together = [prompt for prompt, _ in prompts[: count + 1]]
            settings = settings.replace(parallel=count)
            times = ask_together(self._kept, settings, together, params["tokens"], path)
        else:
            times = ask_here(self._kept, settings, prompts, path)
        recording = read_recording(path)
        profile = recording.about["profile"]
        replayed = replay(recording)
        if params["requests"] > 1:
            known = params["tokens"], profile, params["batch_dense"], params["draft"]
            answers = compare_together(recording, times, *known)
        else:
            answers = compare(recording, prompts, times, profile, params["draft"])
        return {
            "answers": answers,
            "profile": profile,
            "prefill": recording.core_config.system.prefill,
            "events": replayed.events,
            "commands": replayed.commands,
            "difference": replayed.difference,
        }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of what was measured, simulated and printed in the paper: decode, and TTFT by length and way."""
    answers = [one for result in results for one in result["answers"]]
    rows = []
    decoded = [one for one in answers if "token_s" in one]
    if decoded:
        tokens = [one["tokens"] - 1 for one in decoded]
        measured, simulated = (
            sum(one[name] * n for one, n in zip(decoded, tokens, strict=True)) / sum(tokens)
            for name in ("token_s", "simulated_token_s")
        )
        paper = None if decoded[0]["prefill"] == TOGETHER else 1 / PAPER_TOKENS_PER_S
        rows.append(_row("decode, s/token", measured, simulated, paper))
        rows[0]["worst_ratio"] = max(one["token_s"] / one["simulated_token_s"] for one in decoded)
        rows[0] |= {name: statistics.mean(o[name] for o in decoded) for name in BLOCKS if name in decoded[0]}
    for way in WAYS:
        for length in sorted({one["prompt_tokens"] for one in answers}):
            of = [one for one in answers if (one["prefill"], one["prompt_tokens"]) == (way, length)]
            if of:
                measured, simulated = (statistics.mean(o[name] for o in of) for name in ("ttft_s", "simulated_ttft_s"))
                rows.append(_row(f"TTFT, {length} tokens, {way}", measured, simulated, PAPER_TTFT_S.get(length)))
    return rows


def _row(what: str, measured: float, simulated: float, paper: float | None) -> dict[str, Any]:
    return {
        "what": what,
        "measured_s": measured,
        "simulated_s": simulated,
        "ratio": measured / simulated,
        "paper_s": paper,
    }


def described(rows: list[dict[str, Any]], results: list[dict[str, Any]], args: Any) -> list[dict[str, Any]]:
    """With what was asked, of which cluster, and whether the scheduler decided the same once more."""
    different = next((one["difference"] for one in results if one["difference"]), None)
    about = {
        "cluster": Path(args.cluster).stem,
        "shadow": args.shadow,
        "departure": args.departure,
        "profile": results[0]["profile"],
        "requests": args.requests,
        "draft": str(args.draft),
        "batch_dense": args.batch_dense,
    }
    return [about | row | {"replayed": different or "identical"} for row in rows]


def _cluster(row: Row) -> str:
    several = [plural(row["requests"], "request")] if row["requests"] > 1 else []
    return ", ".join([row["cluster"], *filter(None, (row["shadow"], row["departure"])), *several])


COLUMNS = (
    Column("cluster", _cluster),
    Column("profile", "profile"),
    Column("seconds", "what"),
    Column("measured", "measured_s", ".4f"),
    Column("simulated", "simulated_s", ".4f"),
    Column("ratio", "ratio", ".3f"),
    Column("paper", "paper_s", ".3f"),
    Column("replayed", "replayed"),
)
DRAFTED = (
    *COLUMNS[:-2],
    Column("rows a pass", "rows", ".2f"),
    Column("simulated", "simulated_rows", ".2f"),
    Column("tokens a pass", "tokens_a_pass", ".2f"),
    Column("simulated", "simulated_tokens_a_pass", ".2f"),
    COLUMNS[-1],
)
"""With drafts."""


def _draft(given: str) -> int | str:
    return AUTO if given == AUTO else int(given)


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(4, 1), tokens=(64, 12))
    parser.add_argument("--cluster", default="embedded", choices=("embedded", "local"), help="(%(default)s)")
    common_flags(parser, "profile", "shadow", "prompt-tokens")
    parser.add_argument("--mini-batch", type=positive, default=None)
    parser.add_argument("--requests", type=positive, default=1, help="prompts asked at once (%(default)s)")
    parser.add_argument("--batch-dense", action="store_true", help="as odmoe generate has it")
    parser.add_argument("--departure", choices=(AT_ONCE, LATE), default=AT_ONCE, help="of the shadow (%(default)s)")
    parser.add_argument("--slots", type=positive, default=1, help="of each worker (%(default)s)")
    parser.add_argument("--draft", type=_draft, default=0, help=f"{AUTO}, or drafts of a block (%(default)s)")
    args = parse_flags(parser)
    if args.requests > 1:
        args.prompts = args.requests
    return args


def main() -> int:
    args = parse()
    header(f"Emulated against simulated, {plural(args.prompts, 'prompt')}, answers of {args.tokens} tokens")
    store, tokenizer = open_model(args, "float32")
    params = {
        "cluster": args.cluster,
        "profile": args.profile,
        "prompts": args.prompts,
        "seed": args.seed,
        "tokens": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "mini_batch": args.mini_batch,
        "shadow": args.shadow,
        "departure": args.departure,
        "slots": args.slots,
        "requests": args.requests,
        "batch_dense": args.batch_dense,
        "draft": args.draft,
    }
    ways = WAYS if args.requests == 1 and not args.draft else WAYS[:1]
    wanted = [Cell({**params, "prefill": way}) for way in ways]
    depends = {"model": store.manifest.fingerprint, "sources": sources(*PACKAGES)}
    note = f"emulated and simulated: {args.profile}"
    name = f"agreement-{args.cluster}{f'-{args.requests}' * (args.requests > 1)}{'-drafts' * bool(args.draft)}"
    with (
        Experiment(name, args, VERSION, depends, note) as run,
        KeptCluster(store) as kept,
    ):
        results = run.all(wanted, Measure(args, tokenizer, run, kept))
        rows = described(summary(results), results, args)
        answers = [one for result in results for one in result["answers"]]
        run.write(rows, cells=results)
        print(text_table(DRAFTED if args.draft else COLUMNS, rows))
        if "worst_ratio" in rows[0]:
            measured, simulated = 1 / rows[0]["measured_s"], 1 / rows[0]["simulated_s"]
            said = f"{measured:.3f} tokens/s measured, {simulated:.3f} simulated"
            said += f", the paper's {PAPER_TOKENS_PER_S}" if args.requests == 1 else f" for each of {args.requests}"
            print(f"decode: {said}; the worst prompt's ratio {rows[0]['worst_ratio']:.3f}, the goal {GOAL}")
        for one in results:
            said = one["difference"] or "identical commands, in order"
            print(f"replayed ({one['prefill']}): {one['events']} events, {one['commands']} commands: {said}")
        if missing := sum(one["unpredicted"] for one in answers):
            print(f"{missing} activated experts had no prediction when their answer was told: it did not come in time")
        print(run.written())
    return int(any(one["difference"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
