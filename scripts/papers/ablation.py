"""The six cases of OD-MoE Fig 8: what prediction and each alignment are worth in decode tokens/s.

    .venv/bin/python -m scripts.papers.ablation                            # emulated, in real time: half an hour
    .venv/bin/python -m scripts.papers.ablation --how simulated            # recorded, then simulated: some minutes
    .venv/bin/python -m scripts.papers.ablation --how emulated simulated   # both, side by side
    .venv/bin/python -m scripts.papers.ablation --prompts 30 --tokens 256 --how simulated   # as the paper

Emulated: all nodes in this process, which keep the profile's times. Simulated: the real model answers once without
them for each of cases 1 to 4, and the scheduler runs on its routes and predictions with the profile's times; cases 5
and 6 have the routes of case 1, since answers do not depend on predictions.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from odmoe.settings.settings import Settings
from scheduler.alignment import LATE, Alignment
from scheduler.timing.profile import Profile
from scripts.lib import recorded_runs
from scripts.lib.clusters import KeptCluster, answer, open_model
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, experiment_flags, parse_flags
from scripts.lib.ledger import digest, sources
from scripts.lib.plots import BLUE, DARK, PALE, canvas
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table

VERSION = 1
CASES: dict[int, tuple[str, dict[str, Any]]] = {
    1: ("token and\nKV aligned", {"align_token": 1, "align_kv": 1}),
    2: ("token\naligned", {"align_token": 1, "align_kv": 0}),
    3: ("KV\naligned", {"align_token": 0, "align_kv": 1}),
    4: ("not\naligned", {"align_token": 0, "align_kv": 0}),
    5: ("random\nprefetch", {"predictor": "random"}),
    6: ("load after\nrouting", {"predictor": "none"}),
}
GUESS = {1: 4.0, 2: 3.9, 3: 3.5, 4: 2.5, 5: 1.05, 6: 1.03}
"""Emulated tokens/s of a first estimate."""
PAPER = {"rtx3090-1gbe": 3.65}
"""Table 2, 16 prompt tokens and 256 of the answer: case 1."""


def plan(args: Any, prompts: list[list[int]], timings: str) -> list[Cell]:
    """Recordings first, then simulations of them, then emulated answers, case by case."""
    sizes = {"prompts": digest(prompts), "tokens": args.tokens}
    profile = {"profile": args.profile, "timings": timings}
    wanted = []
    if "simulated" in args.how:
        cost = args.prompts * args.tokens / recorded_runs.TOKENS_PER_S
        wanted = [Cell({"how": "recorded", "case": case, **sizes}, cost) for case in (1, 2, 3, 4)]
        of = {**profile, "scheduler": sources("scheduler"), **sizes}
        wanted += [Cell({"how": "simulated", "case": case, **of}, 0.02 * args.tokens, ("scheduler",)) for case in CASES]
    if "emulated" in args.how:
        of = {"how": "emulated", **profile, "tokens": args.tokens}
        wanted += [
            Cell({**of, "case": case, "prompt": n, "ids": digest(prompt)}, args.tokens / GUESS[case])
            for case in CASES
            for n, prompt in enumerate(prompts)
        ]
    return wanted


class Measure:
    """Computes any cell."""

    def __init__(self, args: Any, prompts: list[list[int]], profile: Profile, run: Any, kept: KeptCluster) -> None:
        self._args, self._prompts, self._profile, self._run, self._kept = args, prompts, profile, run, kept

    def __call__(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"recorded": self._record, "simulated": self._simulate, "emulated": self._emulate}[params["how"]](params)

    def _settings(self, case: int, **more: Any) -> Settings:
        chosen = {"shadow": self._args.shadow, "departure": LATE, **CASES[case][1], **more}
        return Settings(model=self._args.model, dtype="float32", **chosen)

    def recording(self, case: int) -> Any:
        sizes = {"prompts": digest(self._prompts), "tokens": self._args.tokens}
        return self._run.path({"how": "recorded", "case": case, **sizes}, ".recording")

    def whole(self, params: dict[str, Any]) -> bool:
        """A recording may have been removed."""
        return bool(params["how"] != "recorded" or self.recording(params["case"]).is_file())

    def _record(self, params: dict[str, Any]) -> dict[str, Any]:
        case = params["case"]
        path = self.recording(case)
        return recorded_runs.record(self._kept, self._settings(case), self._prompts, self._args.tokens, path)

    def _simulate(self, params: dict[str, Any]) -> dict[str, Any]:
        settings = self._settings(params["case"])
        case = params["case"] if settings.system_config.predictor == "sep" else 1
        found = recorded_runs.requests(self.recording(case), self._prompts, self._args.tokens)
        outcomes = [
            recorded_runs.simulated(
                self._profile,
                one,
                alignment=Alignment(settings.align_token, settings.align_kv),
                system=settings.system_config,
            )
            for one in found
        ]
        return {
            "tokens_per_s": [one.decode_tokens_per_s for one in outcomes],
            "recall": [one.stats.overall.recall for one in outcomes],
            "bound": [one.bottleneck for one in outcomes],
        }

    def _emulate(self, params: dict[str, Any]) -> dict[str, Any]:
        settings = self._settings(params["case"], profile=self._args.profile)
        cluster = self._kept.cluster(settings, warm=self._prompts[0])
        report = answer(cluster, self._prompts[params["prompt"]], self._args.tokens)
        return {
            "tokens_per_s": [report.decode_tokens_per_s],
            "recall": [report.recall],
            "stall_s": report.stall_s,
            "reloads": report.reloads,
            "unused_loads": report.unused_loads,
            "unpredicted": report.unpredicted,
        }


def summary(wanted: list[Cell], results: list[dict[str, Any]], profile: str) -> list[dict[str, Any]]:
    """One row a way and case, over the prompts."""
    speeds: dict[tuple[str, int], list[float]] = {}
    recalls: dict[tuple[str, int], list[float]] = {}
    for one, result in zip(wanted, results, strict=True):
        key = (one.params["how"], one.params["case"])
        if key[0] != "recorded":
            speeds.setdefault(key, []).extend(result["tokens_per_s"])
            recalls.setdefault(key, []).extend(value for value in result["recall"] if value is not None)
    return [
        {
            "how": how,
            "profile": profile,
            "case": case,
            "is": CASES[case][0].replace("\n", " "),
            "prompts": len(of),
            "decode_tokens_per_s": statistics.mean(of),
            "deviation": statistics.stdev(of) if len(of) > 1 else None,
            "recall": statistics.mean(recalls[how, case]) if recalls[how, case] else None,
            "by_prompt": of,
        }
        for (how, case), of in speeds.items()
    ]


COLUMNS = (
    Column("case", "case", "d"),
    Column("is", "is"),
    Column("tokens/s", "decode_tokens_per_s", ".2f"),
    Column("+-", "deviation", ".2f"),
    Column("recall", "recall", ".2%"),
    Column("profile", lambda row: f"{row['how']}: {row['profile']}"),
)


def in_order(rows: list[dict[str, Any]], how: str) -> str:
    """Whether the cases fall from 1 to 6, as the paper's do."""
    means = [row["decode_tokens_per_s"] for row in rows if row["how"] == how]
    wrong = [f"case {n} is not faster than case {n + 1}" for n in range(1, 6) if means[n - 1] <= means[n]]
    return f"{how}: " + ("in the paper's order, falling from case 1 to 6" if not wrong else "; ".join(wrong))


def draw(run: Experiment, rows: list[dict[str, Any]], args: Any) -> Any:
    figure, (panel,) = canvas(8.4, 4.6)
    hows = [how for how in ("emulated", "simulated") if any(row["how"] == how for row in rows)]
    width = 0.78 / len(hows)
    for place, (how, colour) in enumerate(zip(hows, (BLUE, PALE), strict=False)):
        of = [row for row in rows if row["how"] == how]
        at = [row["case"] + (place - (len(hows) - 1) / 2) * width for row in of]
        heights = [row["decode_tokens_per_s"] for row in of]
        spread = [row["deviation"] or 0.0 for row in of]
        panel.bar(
            at,
            heights,
            width * 0.94,
            yerr=spread,
            capsize=3,
            color=colour,
            ecolor=DARK,
            error_kw={"lw": 1},
            label=f"{how}: {args.profile}",
        )
        for x, height, error in zip(at, heights, spread, strict=True):
            panel.text(x, height + error + 0.04, f"{height:.2f}", ha="center", va="bottom", fontsize=8)
    if args.profile in PAPER:
        panel.plot(
            [0.6, 1.4],
            [PAPER[args.profile]] * 2,
            color=DARK,
            ls="--",
            lw=1.2,
            label=f"paper, case 1: {PAPER[args.profile]} (Table 2)",
        )
    panel.set_xticks(list(CASES), [f"{case}: {label}" for case, (label, _) in CASES.items()], fontsize=8.5)
    panel.set_ylabel("decode tokens/s")
    panel.set_ylim(0, panel.get_ylim()[1] * 1.04)
    sizes = f"{plural(args.prompts, 'prompt')} of {args.prompt_tokens} tokens, answers of {args.tokens}"
    panel.set_title(
        f"What prediction and alignment are worth (Fig 8)\n{args.shadow.upper()} shadow, {sizes}; "
        "mean and standard deviation over prompts",
        fontsize=10,
        loc="left",
    )
    panel.legend(loc="upper right", frameon=False, fontsize=8.5)
    return run.save(figure)


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(4, 2), tokens=(128, 32))
    parser.add_argument("--how", nargs="+", choices=("emulated", "simulated"), default=["emulated"])
    common_flags(parser, "profile", "shadow", "prompt-tokens")
    return parse_flags(parser)


def main() -> int:
    args = parse()
    header(f"Six cases, {plural(args.prompts, 'prompt')} of {args.prompt_tokens} tokens, answers of {args.tokens}")
    store, tokenizer = open_model(args, "float32")
    profile = recorded_runs.fitted(args.profile, store)
    prompts = prompts_of_length(tokenizer, args.prompts, args.prompt_tokens, args.seed)
    depends = {"model": store.manifest.fingerprint, "shadow": args.shadow}
    note = "; ".join(f"{how}: {args.profile}" for how in args.how)
    wanted = plan(args, prompts, digest(profile))
    with Experiment("ablation", args, VERSION, depends, note) as run, KeptCluster(store) as kept:
        measure = Measure(args, prompts, profile, run, kept)
        rows = summary(wanted, run.all(wanted, measure, measure.whole), args.profile)
        order = [in_order(rows, how) for how in args.how]
        run.write(rows, order=order)
        print(text_table(COLUMNS, rows))
        print("\n".join(order))
        print(run.written([draw(run, rows, args)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
