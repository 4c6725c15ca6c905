"""Decode tokens/s over token period x KV period: OD-MoE Figs 9 (RTX 3090 workers) and 10 (RTX 3080).

    .venv/bin/python -m scripts.papers.sweep_alignment                # a quarter of an hour
    .venv/bin/python -m scripts.papers.sweep_alignment --quick        # a minute: periods 1, 4, 16
    .venv/bin/python -m scripts.papers.sweep_alignment --check 3      # three cells a profile in real time, too
    .venv/bin/python -m scripts.papers.sweep_alignment --profiles my.yaml
    .venv/bin/python -m scripts.papers.sweep_alignment --live 4       # and --align auto in real time, after four rounds

The real model answers once for each pair of periods (what its shadow predicts is decided by them, not by time), and
the scheduler runs on its routes and predictions with each profile's times. --check has the cells of the optimum, of
the longest periods and of some between them run on real, emulated clusters. --live has such a cluster choose its
periods by itself: it answers all prompts so many times, then once more, which is compared with the optimum of the sweep
on another cluster.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from odmoe.settings.settings import Settings
from scheduler.alignment import AUTO, FIXED, LATE, Alignment
from scheduler.policies.system_config import SystemConfig
from scheduler.timing.profile import Profile
from scripts.lib import recorded_runs
from scripts.lib.clusters import KeptCluster, answer, open_model
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, experiment_flags, parse_flags, positive
from scripts.lib.ledger import digest, sources
from scripts.lib.plots import DARK, RED, canvas
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header

VERSION = 2
PERIODS = (1, 2, 4, 8, 16)
PAPER = {"rtx3090-1gbe": ("Fig 9", (1, 1)), "rtx3080-1gbe": ("Fig 10", (1, 4))}
"""The figure, and its optimum as (token period, KV period)."""
Pair = tuple[int, int]
Speeds = dict[Pair, list[float]]


class Sweep:
    """Computes any cell: `recorded`, `simulated` and `emulated`."""

    def __init__(self, args: Any, prompts: list[list[int]], profiles: dict[str, Profile], run: Any, kept: Any) -> None:
        self._args, self._prompts, self._profiles, self._run, self._kept = args, prompts, profiles, run, kept
        self._sizes = {"prompts": digest(prompts), "tokens": args.tokens}

    def recorded(self) -> list[Cell]:
        cost = self._args.prompts * self._args.tokens / recorded_runs.TOKENS_PER_S
        return [Cell(self._recorded(pair), cost) for pair in self.pairs()]

    def _recorded(self, pair: Pair) -> dict[str, Any]:
        return {"how": "recorded", "token": pair[0], "kv": pair[1], **self._sizes}

    def pairs(self) -> list[Pair]:
        return [(token, kv) for token in self._args.periods for kv in self._args.periods]

    def simulated(self, name: str) -> list[Cell]:
        of = {"profile": name, "timings": digest(self._profiles[name]), **self._sizes}
        of |= {"how": "simulated", "scheduler": sources("scheduler")}
        cost = 0.003 * self._args.prompts * self._args.tokens
        return [Cell({**of, "token": token, "kv": kv}, cost, ("scheduler",)) for token, kv in self.pairs()]

    def emulated(self, name: str, pair: Pair) -> Cell:
        of = {
            "profile": name,
            "timings": digest(self._profiles[name]),
            "ids": digest(self._prompts[0]),
        }
        params = {"how": "emulated", "token": pair[0], "kv": pair[1], "tokens": self._args.tokens, **of}
        return Cell(params, self._args.tokens / 3.0)

    def live(self, name: str, pair: Pair | None) -> Cell:
        """The last of several rounds over all prompts: of periods that are chosen live, or of fixed ones."""
        rounds = self._args.live if pair is None else 1
        of = {"profile": name, "timings": digest(self._profiles[name]), "rounds": rounds, **self._sizes}
        token, kv = pair or (1, 1)
        params = {"how": "live" if pair is None else "kept", "token": token, "kv": kv, **of}
        return Cell(params, (1 + rounds) * self._args.prompts * self._args.tokens / 3.0)

    def whole(self, params: dict[str, Any]) -> bool:
        """A recording may have been removed."""
        return bool(params["how"] != "recorded" or self._path((params["token"], params["kv"])).is_file())

    def _path(self, pair: Pair) -> Path:
        return Path(self._run.path(self._recorded(pair), ".recording"))

    def measure(self, params: dict[str, Any]) -> dict[str, Any]:
        pair = (params["token"], params["kv"])
        settings = Settings(
            model=self._args.model,
            dtype="float32",
            shadow=self._args.shadow,
            align_token=pair[0],
            align_kv=pair[1],
            departure=LATE,
        )
        if params["how"] == "recorded":
            return recorded_runs.record(self._kept, settings, self._prompts, self._args.tokens, self._path(pair))
        emulated = settings.replace(profile=params["profile"], workers=self._profiles[params["profile"]].workers)
        if params["how"] == "emulated":
            cluster = self._kept.cluster(emulated, warm=self._prompts[0])
            report = answer(cluster, self._prompts[0], self._args.tokens)
            return {"tokens_per_s": [report.decode_tokens_per_s]}
        if params["how"] in ("live", "kept"):
            align = AUTO if params["how"] == "live" else FIXED
            cluster = self._kept.cluster(emulated.replace(align=align), warm=self._prompts[0])
            for _ in range(params["rounds"]):
                for prompt in self._prompts:
                    answer(cluster, prompt, self._args.tokens)
            reports = [answer(cluster, prompt, self._args.tokens) for prompt in self._prompts]
            return {"tokens_per_s": [one.decode_tokens_per_s for one in reports], "periods": reports[-1].periods}
        found = recorded_runs.requests(self._path(pair), self._prompts, self._args.tokens)
        profile = self._profiles[params["profile"]]
        outcomes = [
            recorded_runs.simulated(profile, one, alignment=Alignment(*pair), system=SystemConfig(departure=LATE))
            for one in found
        ]
        return {
            "tokens_per_s": [one.decode_tokens_per_s for one in outcomes],
            "recall": statistics.mean(one.stats.overall.recall or 0.0 for one in outcomes),
            "where": {cause: statistics.mean(o.where[cause] for o in outcomes) for cause in outcomes[0].where},
        }


def best(speeds: Speeds) -> Pair:
    return max(speeds, key=lambda pair: statistics.mean(speeds[pair]))


def to_check(speeds: Speeds, count: int) -> list[Pair]:
    """The optimum, the longest periods, and others evenly between."""
    pairs = sorted(speeds)
    wanted = [best(speeds), pairs[-1], *pairs[:: max(1, len(pairs) // max(1, count))], *pairs]
    return list(dict.fromkeys(wanted))[:count]


def draw(run: Experiment, found: dict[str, Speeds], args: Any) -> Any:
    figure, panels = canvas(5.2 * len(found), 4.9, 1, len(found))
    means = {name: {pair: statistics.mean(of) for pair, of in speeds.items()} for name, speeds in found.items()}
    values = [value for of in means.values() for value in of.values()]
    low, high = min(values), max(values)
    periods = args.periods
    for panel, (name, speeds) in zip(panels, means.items(), strict=True):
        grid = [[speeds[token, kv] for kv in periods] for token in periods]
        image = panel.imshow(grid, cmap="cividis", vmin=low, vmax=high)
        top = best(found[name])
        for y, token in enumerate(periods):
            for x, kv in enumerate(periods):
                ink = DARK if grid[y][x] > (low + high) / 2 else "white"
                weight = "bold" if (token, kv) == top else "normal"
                panel.text(x, y, f"{grid[y][x]:.2f}", ha="center", va="center", fontsize=9.5, color=ink, weight=weight)
        _frame(panel, periods, top)
        paper = PAPER.get(name)
        where = (
            f"{paper[0]}: optimum there at token {paper[1][0]}, KV {paper[1][1]}" if paper else "no figure in the paper"
        )
        panel.set_title(f"simulated: {name}\n{where}", fontsize=9.5)
        panel.set_xticks(range(len(periods)), [str(p) for p in periods])
        panel.set_yticks(range(len(periods)), [str(p) for p in periods])
        panel.set_xlabel("KV rows aligned every so many tokens", fontsize=9)
        panel.tick_params(length=0)
    panels[0].set_ylabel("token aligned every so many tokens", fontsize=9)
    figure.colorbar(image, ax=panels, label="decode tokens/s", shrink=0.8)
    figure.suptitle(
        f"Decode tokens/s over alignment periods, mean of {plural(args.prompts, 'prompt')} (red: the best)",
        fontsize=11,
    )
    return run.save(figure)


def _frame(panel: Any, periods: tuple[int, ...], pair: Pair) -> None:
    x, y = periods.index(pair[1]), periods.index(pair[0])
    panel.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, ec=RED, lw=2.6))


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(3, 1), tokens=(96, 16))
    parser.add_argument("--profiles", nargs="+", default=list(PAPER), help="names or files")
    parser.add_argument("--live", type=int, default=0, metavar="N", help="compare --align auto after N rounds, too")
    common_flags(parser, "shadow", "prompt-tokens")
    parser.add_argument("--periods", nargs="+", type=positive)
    parser.add_argument("--check", type=int, default=0, metavar="N", help="run N cells of each profile emulated, too")
    args = parse_flags(parser)
    args.periods = tuple(sorted(set(args.periods))) if args.periods else (1, 4, 16) if args.quick else PERIODS
    return args


def main() -> int:
    args = parse()
    sizes = f"{plural(args.prompts, 'prompt')} of {args.prompt_tokens} tokens, answers of {args.tokens}"
    header(f"Alignment periods, {sizes}")
    store, tokenizer = open_model(args, "float32")
    profiles = {name: recorded_runs.fitted(name, store) for name in args.profiles}
    prompts = prompts_of_length(tokenizer, args.prompts, args.prompt_tokens, args.seed)
    depends = {"model": store.manifest.fingerprint, "shadow": args.shadow}
    note = f"simulated: {', '.join(args.profiles)}"
    with Experiment("sweep_alignment", args, VERSION, depends, note) as run, KeptCluster(store) as kept:
        sweep = Sweep(args, prompts, profiles, run, kept)
        run.all(sweep.recorded(), sweep.measure, sweep.whole)
        rows, found = [], {}
        for name in args.profiles:
            results = run.all(sweep.simulated(name), sweep.measure)
            found[name] = {pair: one["tokens_per_s"] for pair, one in zip(sweep.pairs(), results, strict=True)}
            rows += [_row(name, pair, one) for pair, one in zip(sweep.pairs(), results, strict=True)]
            top = best(found[name])
            said = (
                f"best at token period {top[0]}, KV period {top[1]}: {statistics.mean(found[name][top]):.2f} tokens/s"
            )
            print(f"{name}: {said}; {_paper(name)} (simulated: {name})")
        checks = [
            _check(run, sweep, name, pair, found)
            for name in args.profiles
            for pair in to_check(found[name], args.check)
        ]
        live = [_live(run, sweep, name, best(found[name])) for name in args.profiles if args.live]
        run.write(rows, best={name: best(of) for name, of in found.items()}, checks=checks, live=live)
        print(run.written([draw(run, found, args)]))
    return 0


def _row(name: str, pair: Pair, result: dict[str, Any]) -> dict[str, Any]:
    mean = statistics.mean(result["tokens_per_s"])
    of = {"profile": name, "token_period": pair[0], "kv_period": pair[1], "decode_tokens_per_s": mean}
    return of | {"recall": result["recall"], "by_prompt": result["tokens_per_s"], "where": result["where"]}


def _paper(name: str) -> str:
    return (
        f"the paper's {PAPER[name][0]}: {PAPER[name][1][0]} and {PAPER[name][1][1]}"
        if name in PAPER
        else "not in the paper"
    )


def _check(run: Experiment, sweep: Sweep, name: str, pair: Pair, found: dict[str, Speeds]) -> dict[str, Any]:
    """One cell in real time, beside what was simulated for the same prompt."""
    [result] = run.all([sweep.emulated(name, pair)], sweep.measure)
    emulated, simulated = result["tokens_per_s"][0], found[name][pair][0]
    said = f"emulated {emulated:.3f}, simulated {simulated:.3f} tokens/s, ratio {emulated / simulated:.3f}"
    print(f"{name}, token {pair[0]}, KV {pair[1]}: {said}")
    return {
        "profile": name,
        "token_period": pair[0],
        "kv_period": pair[1],
        "emulated": emulated,
        "simulated": simulated,
        "ratio": emulated / simulated,
    }


def _live(run: Experiment, sweep: Sweep, name: str, pair: Pair) -> dict[str, Any]:
    """Periods chosen live beside the sweep's best, both in real time."""
    fixed, live = run.all([sweep.live(name, pair), sweep.live(name, None)], sweep.measure)
    speeds = [statistics.harmonic_mean(one["tokens_per_s"]) for one in (fixed, live)]
    ratio, periods = speeds[1] / speeds[0], tuple(live["periods"])
    said = f"chosen live {periods}: {speeds[1]:.3f} tokens/s, the sweep's best {pair}: {speeds[0]:.3f}"
    print(f"{name}, emulated: {said}, ratio {ratio:.3f}")
    return {"profile": name, "periods": periods, "live": speeds[1], "best": pair, "fixed": speeds[0], "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main())
