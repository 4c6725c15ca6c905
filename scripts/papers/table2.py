"""Table 2 of the OD-MoE paper: speed, device memory by role, and answer quality as far as it needs no judge.

.venv/bin/python -m scripts.papers.table2                        # about 25 minutes on two cores
.venv/bin/python -m scripts.papers.table2 --quick                # a minute or two
.venv/bin/python -m scripts.papers.table2 --cluster local        # processes and gRPC; perplexity is then not measured
.venv/bin/python -m scripts.papers.table2 --parts emulated       # only what stands beside the paper's own figures

Two kinds of speed. "As it is": this machine's own times, with the small model, beside Transformers with all experts in
memory and accelerate with experts on disk. "Emulated": our cluster on a profile's times, with a model of Mixtral's
layers, experts and top-k, beside what the paper printed of its testbed. The two are not to be compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odmoe.quality import passages
from odmoe.quality.readers import forced_logits, until_end
from odmoe.quality.tasks import final_answer
from odmoe.settings.settings import Settings
from scheduler.alignment import LATE
from scheduler.timing.profile import find_profile
from scripts.lib import peers, quality
from scripts.lib.bench import Bench
from scripts.lib.clusters import KeptCluster, answer
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, experiment_flags, parse_flags, positive
from scripts.lib.ledger import digest
from scripts.lib.paths import DEEP, DEMO, ROOT
from scripts.lib.peers import COLD, OFFLOADED, TRANSFORMERS, Peer
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header
from scripts.papers import table2_show as show

VERSION = 2
OURS: dict[str, dict[str, Any]] = {
    "OD-MoE": {},
    "load on demand": {"predictor": "none"},
    "fully cached": {"predictor": "none", "residency": "all"},
}
IN_TURN = "OD-MoE, in turn"
"""Prefill's loads, transfers and computations one after the other, as the paper's figures suggest. Emulated only."""
EMULATED = {"OD-MoE": {}, IN_TURN: {"prefill": "in-turn"}, **OURS}
PARTS = ("speed", "emulated", "quality")
SECONDS = {
    "OD-MoE": 0.05,
    "load on demand": 0.05,
    "fully cached": 0.04,
    TRANSFORMERS: 0.008,
    OFFLOADED: 0.02,
    COLD: 0.1,
}
"""About how long a token takes, for the progress bar."""
EMULATED_SECONDS = {"OD-MoE": 0.3, "load on demand": 1.0, "fully cached": 0.2, IN_TURN: 0.3}
PROBLEMS_A_CELL = 4


@dataclass
class Columns:
    """The columns of one model, each engine begun when it is first asked for."""

    model: str
    profile: str | None
    bench: Bench
    stack: contextlib.ExitStack
    run: Experiment

    def __post_init__(self) -> None:
        self.args = self.bench.args
        self.store, self.tokenizer = self.bench.opened(self.model)
        self._kept = self.stack.enter_context(KeptCluster(self.store))
        self._warm: Any = None

    def identity(self) -> dict[str, Any]:
        """Everything that decides the figures of this model."""
        profile = None if self.profile is None else digest(find_profile(self.profile))
        return {**self.bench.identity(self.model), "profile": profile}

    def settings(self, column: str) -> Settings:
        changes = dict(EMULATED[column])
        if changes.get("residency") == "all":
            layers = self.store.manifest.layers
            workers = Settings().workers
            changes["slots"] = sum(-(-len(layers[n].blobs) // workers) for n in self.store.manifest.moe_layers)
        return Settings(
            model=self.model,
            dtype=self.args.dtype,
            cluster=self.args.cluster,
            shadow=self.args.shadow,
            profile=self.profile,
            departure=LATE,
            **changes,
        )

    def cluster(self, column: str) -> Any:
        """Its shadow joined, and every expert once loaded if experts stay, before anything is measured."""
        found = self._kept.cluster(self.settings(column))
        if found is not self._warm:
            self._warm = None
            stay = EMULATED[column].get("residency") == "all"
            for prompt in self.prompts(128, 2) if stay else self.prompts(16, 1):
                answer(found, prompt, 2)
            self._warm = found
        return found

    def peer(self, column: str) -> Peer:
        """It has answered once before anything is measured."""
        found = self.bench.peer(self.model, column, lambda: Path(self.stack.enter_context(self.run.scratch())))
        if found is not self._warm:
            found.answer(self.prompts(16, 1)[0], 4)
            self._warm = found
        return found

    def prompts(self, tokens: int, count: int) -> list[list[int]]:
        return prompts_of_length(self.tokenizer, count, tokens, self.args.seed)

    # --- what a cell measures ------------------------------------------------------------------------------------

    def speed(self, params: dict[str, Any]) -> dict[str, Any]:
        column, count = params["column"], params["output"]
        prompts = self.prompts(params["input"], params["prompts"])
        if column in peers.NAMES:
            peer = self.peer(column)
            answers: list[Any] = [peer.answer(prompt, count) for prompt in prompts]
            roles: dict[str, Any] = {"main": max(one.device_bytes for one in answers), "shadow": 0, "workers": []}
            more = {"read_bytes_a_token": sum(one.read_bytes for one in answers) / (count * len(answers))}
        else:
            cluster = self.cluster(column)
            answers = [answer(cluster, prompt, count) for prompt in prompts]
            roles = answers[-1].memory_bytes
            loads = sum(one.loads - one.prefill_loads for one in answers) / ((count - 1) * len(answers))
            if EMULATED[column].get("residency") == "all" and loads > 1:
                raise SystemExit(f"{column}: {loads:.1f} loads a decode token; its experts do not stay in their slots")
            recalls = [one.recall for one in answers if one.recall is not None]  # of equally many experts
            more = {
                "loads_a_token": loads,
                "recall": statistics.fmean(recalls) if recalls else None,
                "unpredicted": sum(one.unpredicted for one in answers),
                "emulated": answers[-1].emulated,
            }
        held = roles["main"] + roles["shadow"] + sum(roles["workers"])
        more |= {"memory_bytes": roles, "of_whole": held / peers.whole_bytes(self.model, self.args.dtype)}
        names = ("ttft_s", "decode_tokens_per_s", "tokens_per_s")
        return {name: [getattr(one, name) for one in answers] for name in names} | more

    def answers(self, params: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens of some GSM8K problems, end of sequence not heeded."""
        first, last = params["problems"]
        ids = [self.tokenizer(text)["input_ids"] for text, _ in quality.problems(last)[first:]]
        column, count = params["column"], params["tokens"]
        if column in peers.NAMES:
            return {"token_ids": [self.peer(column).answer(one, count).token_ids for one in ids]}
        cluster = self.cluster(column)
        return {"token_ids": [list(answer(cluster, one, count).token_ids) for one in ids]}

    def perplexity(self, params: dict[str, Any]) -> dict[str, Any]:
        """Nats of each token of held-out text."""
        ids = quality.held_out(self.tokenizer, params["text_tokens"])
        nats: list[float] = []
        for window in passages.windows(ids, params["window"]):
            if params["column"] in peers.NAMES:
                logits = self.peer(params["column"]).logits(window)
            else:
                logits = forced_logits(self.cluster(params["column"]), window)
            nats += passages.losses(logits, window)
        return {"nats": nats}


def speed_cells(of: Columns, columns: list[str], prompts: int, seconds: dict[str, float]) -> list[Cell]:
    """The paper's cases for each column; in turn, prefill is what differs: only the shorter answers."""
    return [
        Cell(
            {"part": "speed", **of.identity(), "column": column, "input": i, "output": o, "prompts": prompts},
            cost=prompts * seconds[column] * (o + i / 16),
        )
        for column in columns
        for i in (16, 128)
        for o in of.args.outputs
        if column != IN_TURN or o == min(of.args.outputs)
    ]


def quality_cells(of: Columns, columns: list[str]) -> list[Cell]:
    args = of.args
    found = []
    for column in columns:
        mine = {**of.identity(), "column": column}
        for first in range(0, args.problems, PROBLEMS_A_CELL):
            some = [first, min(first + PROBLEMS_A_CELL, args.problems)]
            params = {"part": "answers", **mine, "problems": some, "tokens": args.tokens}
            found.append(Cell(params, cost=SECONDS[column] * args.tokens * (some[1] - some[0])))
        if column in peers.NAMES or args.cluster == "embedded":  # elsewhere the logits stay on the main node
            params = {"part": "perplexity", **mine, "text_tokens": args.text_tokens, "window": args.window}
            found.append(
                Cell(params, cost=SECONDS[column] * (args.window if column in peers.NAMES else args.text_tokens))
            )
    return found


def quality_rows(of: Columns, results: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Token agreement with Transformers, GSM8K's final answers and perplexity of each column."""
    answers: dict[str, list[list[int]]] = {}
    nats: dict[str, list[float]] = {}
    for params, result in results:
        if params["part"] == "answers":
            answers.setdefault(params["column"], []).extend(result["token_ids"])
        elif params["part"] == "perplexity":
            nats[params["column"]] = result["nats"]
    solutions = [solution for _, solution in quality.problems(of.args.problems)]
    ends = {of.tokenizer.eos_token_id}
    found = []
    for column, tokens in answers.items():
        same, total = quality.agreement(tokens, answers[TRANSFORMERS])
        texts = [of.tokenizer.decode(until_end(one, ends), skip_special_tokens=True) for one in tokens]
        row = {
            "part": "quality",
            "column": column,
            "same_tokens": same,
            "tokens": total,
            "final_answers": sum(map(quality.answered, texts, solutions)),
            "problems": len(solutions),
            "numbers_found": sum(final_answer(text) is not None for text in texts),
        }
        if column in nats:
            row |= {
                "perplexity": passages.perplexity(nats[column]),
                "text_tokens": len(nats[column]),
                "most_nats_off": max(abs(a - b) for a, b in zip(nats[column], nats[TRANSFORMERS], strict=True)),
            }
        found.append(row)
    return found


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(2, 1), tokens=(128, 24), model=DEMO)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all unless said")
    parser.add_argument("--cluster", choices=("embedded", "local"), default="embedded")
    common_flags(parser, "shadow", "dtype", "profile")
    parser.add_argument("--emulated-model", default=str(DEEP.relative_to(ROOT)))
    parser.add_argument("--emulated-prompts", type=positive, default=1, help="of each emulated case")
    parser.add_argument("--outputs", nargs="+", type=positive, help="tokens of answers that are timed (64 256)")
    parser.add_argument("--problems", type=positive, help="of GSM8K; 16 unless said")
    parser.add_argument("--text-tokens", type=positive, help="of held-out text; 384 unless said")
    parser.add_argument("--window", type=positive, default=128, help="tokens that are scored together")
    parser.get_default("sizes").update(outputs=((64, 256), (8,)), problems=(16, 2), text_tokens=(384, 48))
    args = parse_flags(parser)
    if args.window < 2 or args.text_tokens < 4 or min(args.outputs) < 2:
        parser.error("--window and --outputs must be at least 2, --text-tokens at least 4")
    if Path(args.emulated_model).exists() is False and (ROOT / args.emulated_model).exists():
        args.emulated_model = str(ROOT / args.emulated_model)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    header("Table 2: speed, device memory, answer quality")
    machine_wide = {
        "dtype": args.dtype,
        "cluster": args.cluster,
        "shadow": args.shadow,
        "seed": args.seed,
        "threads": Settings().threads_a_node,
        "cores": len(os.sched_getaffinity(0)),
    }
    threads = f"{plural(machine_wide['threads'], 'thread')} a node, and for Transformers and accelerate"
    note = f"emulated where it says so: {args.profile}; {threads}" if "emulated" in args.parts else threads
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Experiment("table2", args, VERSION, machine_wide, note))
        plan: list[tuple[str, Columns, Cell]] = []
        bench = stack.enter_context(Bench(args, {}))
        small = Columns(args.model, None, bench, stack, run)
        columns = [*OURS, *peers.NAMES]
        if "speed" in args.parts:
            plan += [(show.AS_IT_IS, small, cell) for cell in speed_cells(small, columns, args.prompts, SECONDS)]
        if "quality" in args.parts:
            plan += [(show.AS_IT_IS, small, cell) for cell in quality_cells(small, [c for c in columns if c != COLD])]
        plan.sort(key=lambda one: columns.index(one[2].params["column"]))  # an engine is begun once
        if "emulated" in args.parts:
            deep = Columns(args.emulated_model, args.profile, bench, stack, run)
            cases = speed_cells(deep, list(EMULATED), args.emulated_prompts, EMULATED_SECONDS)
            plan += [(f"emulated: {args.profile}", deep, cell) for cell in cases]
        whose = {run.key(cell.params): one for _, one, cell in plan}

        def measure(params: dict[str, Any]) -> dict[str, Any]:
            one: Callable[[dict[str, Any]], dict[str, Any]] = getattr(whose[run.key(params)], params["part"])
            return one(params)

        results = run.all([cell for _, _, cell in plan], measure)
        done = [(block, one.params, result) for (block, _, one), result in zip(plan, results, strict=True)]
        rows = show.speed_rows([one for one in done if one[1]["part"] == "speed"])
        if "quality" in args.parts:
            rows += quality_rows(small, [(params, result) for _, params, result in done])
        run.write(rows, paper=show.paper_rows())
        print(show.tables(rows))
        print(run.written())
    sys.exit(any(row["same_tokens"] != row["tokens"] for row in rows if row["part"] == "quality"))


if __name__ == "__main__":
    main()
