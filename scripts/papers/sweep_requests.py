"""Tokens/s and waiting times over the number of requests that are answered at once: throughput and latency.

    .venv/bin/python -m scripts.papers.sweep_requests                 # simulated, a few minutes
    .venv/bin/python -m scripts.papers.sweep_requests --how emulated  # real runs with the profile's times beside it

The real model answers every prompt once, so that routes and predictions are real; the scheduler then answers 1, 2, 4,
... of these requests together with the profile's times. Each request has a forward of its own (`own`), or the dense
part is computed for all together (`batched`, the option --batch-dense). With --how emulated real clusters answer as
many prompts at once, and what they took stands beside what was simulated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from odmoe.settings.settings import Settings
from scheduler.alignment import LATE
from scheduler.simulation.requests import Arrival
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.profile import Profile
from scripts.lib import recorded_runs
from scripts.lib.clusters import KeptCluster, open_model
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, experiment_flags, parse_flags, positive
from scripts.lib.ledger import digest, sources
from scripts.lib.plots import AMBER, BLUE, DARK, canvas
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header
from scripts.lib.simultaneous import answered_together
from scripts.lib.tables import Column, text_table

VERSION = 1
REQUESTS = (1, 2, 4, 8, 16)
WAYS = {"own": (BLUE, "a forward each"), "batched": (AMBER, "dense part together")}
MARKS = {1: "o", 2: "s", 3: "^", 4: "D"}


@dataclass(frozen=True, slots=True)
class Point:
    """A place on a curve."""

    way: str
    slots: int
    requests: int

    @property
    def params(self) -> dict[str, Any]:
        return {"way": self.way, "slots": self.slots, "requests": self.requests}


class Sweep:
    """Computes any cell: `recorded`, `simulated` and `emulated`."""

    def __init__(self, args: Any, prompts: list[list[int]], profile: Profile, run: Any, kept: Any) -> None:
        self._args, self._prompts, self._profile, self._run, self._kept = args, prompts, profile, run, kept
        self._sizes = {"prompts": digest(prompts), "tokens": args.tokens, "shadow": args.shadow}
        self._of = {**self._sizes, "profile": args.profile, "timings": digest(profile)}

    def recorded(self) -> Cell:
        cost = len(self._prompts) * self._args.tokens / recorded_runs.TOKENS_PER_S
        return Cell({"how": "recorded", **self._sizes}, cost)

    def simulated(self, point: Point) -> Cell:
        params = {"how": "simulated", "scheduler": sources("scheduler"), **self._of, **point.params}
        return Cell(params, 0.01 * point.requests * self._args.tokens, ("scheduler",))

    def emulated(self, point: Point) -> Cell:
        return Cell({"how": "emulated", **self._of, **point.params}, 5 + self._args.tokens * point.requests / 4)

    def whole(self, params: dict[str, Any]) -> bool:
        """A recording may have been removed."""
        return bool(params["how"] != "recorded" or self._path().is_file())

    def _path(self) -> Path:
        return Path(self._run.path(self.recorded().params, ".recording"))

    def measure(self, params: dict[str, Any]) -> dict[str, Any]:
        settings = Settings(model=self._args.model, dtype="float32", shadow=self._args.shadow)
        if params["how"] == "recorded":
            late = settings.replace(
                departure=LATE
            )  # what the shadow predicts then does not depend on this machine's speed
            return recorded_runs.record(self._kept, late, self._prompts, self._args.tokens, self._path())
        count, batched = params["requests"], params["way"] == "batched"
        if params["how"] == "emulated":
            changes = {"profile": self._args.profile, "slots": params["slots"], "batch_dense": batched, "threads": 1}
            cluster = self._kept.cluster(settings.replace(**changes, parallel=max(REQUESTS)), warm=self._prompts[0])
            return figures(answered_together(cluster, self._prompts[:count], self._args.tokens))
        found = recorded_runs.requests(self._path(), self._prompts, self._args.tokens)[:count]
        scenario = Scenario(self._profile, requests=count, slots=params["slots"], batch_dense=batched)
        outcome = simulate_requests(scenario, [Arrival(one, one.prompt_tokens, one.tokens) for one in found])
        of = figures([[answer.arrived_s + end for end in answer.ends_s] for answer in outcome.answers])
        return of | {"loads_a_token": outcome.loads_a_token, "union": outcome.union, "where": outcome.where}


def figures(ends: list[list[float]]) -> dict[str, Any]:
    """Of the time of each request's tokens, in seconds from the moment at which all were asked."""
    gaps = [end - start for of in ends for start, end in pairwise(of)]
    decode_s = max(of[-1] for of in ends) - min(of[0] for of in ends)
    return {
        "tokens_per_s": len(gaps) / decode_s,
        "gap_s": median(gaps),
        "worst_gap_s": max(gaps),
        "ttft_s": fmean(of[0] for of in ends),
    }


def draw(run: Experiment, rows: list[dict[str, Any]], args: Any) -> Any:
    figure, panels = canvas(10.4, 4.4, 1, 2)
    emulated = [row for row in rows if "emulated" in row]
    for panel, (name, label) in zip(
        panels, (("gap_s", "time between tokens of a request, s"), ("ttft_s", "time to first token, s")), strict=True
    ):
        for way, (colour, words) in WAYS.items():
            for slots in args.slots:
                of = [row for row in rows if (row["way"], row["slots"]) == (way, slots)]
                places = [row["tokens_per_s"] for row in of], [row[name] for row in of]
                style = {"color": colour, "marker": MARKS.get(slots, "o"), "ls": "-" if slots == 1 else "--"}
                panel.plot(*places, **style, ms=5, lw=1.4, label=f"{words}, {plural(slots, 'slot')} a worker")
                if slots == args.slots[-1]:
                    _number(panel, of, name, way)
        if emulated:
            measured = [row["emulated"] for row in emulated]
            places = [one["tokens_per_s"] for one in measured], [one[name] for one in measured]
            panel.plot(*places, color=DARK, ls="", marker="x", ms=7, label="emulated")
        panel.set_xlabel("tokens/s of all requests together", fontsize=9)
        panel.set_ylabel(label, fontsize=9)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=8.5,
        title=f"Answering {', '.join(map(str, args.requests))} requests at once (simulated: {args.profile})",
        title_fontsize=11,
    )
    return run.save(figure)


def _number(panel: Any, rows: list[dict[str, Any]], name: str, way: str) -> None:
    """The number of requests at each place of a curve. Both ways are the same for a lone request."""
    across, side = (7, "left") if way == "batched" else (-7, "right")
    for row in rows:
        if row["requests"] > 1 or way == "batched":
            place = row["tokens_per_s"], row[name]
            offset = {"xytext": (across, -9 if way == "batched" else 4), "textcoords": "offset points"}
            panel.annotate(str(row["requests"]), place, **offset, ha=side, fontsize=8, color=DARK)


COLUMNS = (
    Column("dense part", "way"),
    Column("slots", "slots"),
    Column("requests", "requests"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("next token s", "gap_s", ".3f"),
    Column("at worst", "worst_gap_s", ".3f"),
    Column("first token s", "ttft_s", ".3f"),
    Column("loads a token", "loads_a_token", ".1f"),
    Column("experts a layer", "union", ".2f"),
    Column("emulated tokens/s", "emulated_tokens_per_s", ".2f"),
    Column("ratio", "ratio", ".3f"),
)


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(16, 8), tokens=(32, 8))
    common_flags(parser, "profile", "shadow", "prompt-tokens")
    parser.add_argument("--requests", nargs="+", type=positive, help="at once (1 2 4 8 16)")
    parser.add_argument("--slots", nargs="+", type=positive, default=[1, 2], help="of each worker (1 2)")
    parser.add_argument("--how", choices=("simulated", "emulated"), default="simulated", help="%(default)s")
    args = parse_flags(parser)
    most = args.prompts
    args.requests = sorted(set(args.requests)) if args.requests else [n for n in REQUESTS if n <= most]
    args.slots = sorted(set(args.slots))
    if args.requests[-1] > most:
        parser.error(f"--requests {args.requests[-1]} needs as many prompts; --prompts is {most}")
    return args


def main() -> int:
    args = parse()
    header(
        f"Requests at once: {plural(args.prompts, 'prompt')} of {args.prompt_tokens} tokens, answers of {args.tokens}"
    )
    store, tokenizer = open_model(args, "float32")
    profile = recorded_runs.fitted(args.profile, store)
    prompts = prompts_of_length(tokenizer, args.prompts, args.prompt_tokens, args.seed)
    note = f"simulated: {args.profile}" + (f"; crosses emulated: {args.profile}" if args.how == "emulated" else "")
    depends = {"model": store.manifest.fingerprint}
    with Experiment("sweep_requests", args, VERSION, depends, note) as run, KeptCluster(store) as kept:
        sweep = Sweep(args, prompts, profile, run, kept)
        run.all([sweep.recorded()], sweep.measure, sweep.whole)
        points = [Point(way, slots, count) for way in WAYS for slots in args.slots for count in args.requests]
        results = run.all([sweep.simulated(point) for point in points], sweep.measure)
        rows = [point.params | result for point, result in zip(points, results, strict=True)]
        if args.how == "emulated":
            measured = run.all([sweep.emulated(point) for point in points], sweep.measure)
            for row, one in zip(rows, measured, strict=True):
                row |= {"emulated": one, "emulated_tokens_per_s": one["tokens_per_s"]}
                row["ratio"] = row["tokens_per_s"] / one["tokens_per_s"]
        run.write(rows)
        print(f"{note}\n{text_table(COLUMNS, rows)}")
        print(run.written([draw(run, rows, args)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
