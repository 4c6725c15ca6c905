"""Time to first token over the size of prefill's mini-batches: what `--mini-batch` should be, and what it brings.

    .venv/bin/python -m scripts.papers.sweep_minibatch                # a minute or two

The real model reads prompts of each length once, so that the rows of each expert are real; the scheduler then runs on
them with a profile's times, its loads, transfers and computations at once (`--prefill ahead`) and one after the other
(`in-turn`). The best is the size that is least slower than each length's best, on the geometric mean of the lengths,
with everything at once; "own" is what
the scheduler chooses by itself.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from odmoe.settings.settings import Settings
from scheduler.policies.system_config import SystemConfig
from scheduler.timing.profile import Profile
from scripts.lib import recorded_runs
from scripts.lib.clusters import KeptCluster, open_model
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, experiment_flags, parse_flags, positive
from scripts.lib.ledger import digest, sources
from scripts.lib.plots import AMBER, BLUE, DARK, PALE, canvas
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header

VERSION = 2
OWN = -1
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 0, OWN)
"""Rows; 0: no mini-batches; OWN: as the scheduler chooses if nobody does."""
NONE = 1 << 20
WAYS = {"ahead": (BLUE, "o", "loads ahead, link both ways at once"), "in-turn": (AMBER, "s", "one after the other")}
PAPER = {"rtx3090-1gbe": {16: 1.345, 128: 3.143}}
"""Seconds, the mean of Table 2's two columns each."""
Key = tuple[int, str, int]
"""Length, way, size."""


class Sweep:
    """Computes any cell: `recorded` and `simulated`."""

    def __init__(self, args: Any, prompts: dict[int, list[list[int]]], profile: Profile, run: Any, kept: Any) -> None:
        self._args, self._prompts, self._profile, self._run, self._kept = args, prompts, profile, run, kept
        self._of = {"profile": args.profile, "timings": digest(profile)}

    def recorded(self, length: int) -> Cell:
        params = {"how": "recorded", "length": length, "prompts": digest(self._prompts[length])}
        return Cell(params, 0.01 * length * self._args.prompts + 3)

    def simulated(self, key: Key) -> Cell:
        length, way, size = key
        params = {"how": "simulated", "prefill": way, "mini_batch": size, "scheduler": sources("scheduler")}
        cost = 0.1 + length / 64 / abs(size or NONE)
        return Cell(self.recorded(length).params | params | self._of, cost, ("scheduler",))

    def whole(self, params: dict[str, Any]) -> bool:
        """A recording may have been removed."""
        return params["how"] != "recorded" or self._path(params["length"]).is_file()

    def _path(self, length: int) -> Path:
        return Path(self._run.path(self.recorded(length).params, ".recording"))

    def measure(self, params: dict[str, Any]) -> dict[str, Any]:
        length = params["length"]
        prompts = self._prompts[length]
        base = Settings(model=self._args.model, dtype="float32", predictor="none")
        if params["how"] == "recorded":
            return recorded_runs.record(self._kept, base, prompts, 1, self._path(length))
        size = None if params["mini_batch"] == OWN else params["mini_batch"] or NONE
        system = SystemConfig("none", prefill=params["prefill"])
        found = recorded_runs.requests(self._path(length), prompts, 1)
        outcomes = [recorded_runs.simulated(self._profile, one, system=system, mini_batch=size) for one in found]
        return {"ttft_s": [one.ttft_s for one in outcomes]}


def worse(found: dict[Key, float], size: int) -> float:
    """How many times each length's best a size takes, on the geometric mean, with everything at once."""
    lengths = sorted({length for length, _, _ in found})
    best = [min(v for (of, way, _), v in found.items() if (of, way) == (length, "ahead")) for length in lengths]
    return math.prod(found[n, "ahead", size] / b for n, b in zip(lengths, best, strict=True)) ** (1 / len(lengths))


def named(size: int) -> str:
    return {0: "none", OWN: "own"}.get(size, str(size))


def draw(run: Experiment, found: dict[Key, float], args: Any, size: int) -> Any:
    figure, panels = canvas(max(7.0, 4.2 * len(args.lengths)), 4.2, 1, len(args.lengths))
    paper = PAPER.get(args.profile, {})
    at = range(len(SIZES))
    for panel, length in zip(panels, args.lengths, strict=True):
        panel.axvline(SIZES.index(size), color=PALE, lw=7, alpha=0.45, zorder=0)
        for way, (colour, mark, label) in WAYS.items():
            values = [found[length, way, one] for one in SIZES]
            panel.plot(at, values, color=colour, marker=mark, ms=4.5, lw=1.4, label=label)
            for x, value in ((values.index(min(values)), min(values)), (len(SIZES) - 2, values[-2])):
                panel.annotate(
                    f"{value:.2f}", (x, value), (0, 6), textcoords="offset points", ha="center", fontsize=8, color=DARK
                )
        if length in paper:
            panel.axhline(paper[length], color=DARK, ls=":", lw=1.1, label="the paper's (Table 2)")
        panel.set_xticks(at, [named(one) for one in SIZES])
        panel.set_xlabel("rows of a mini-batch", fontsize=9)
        panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
        panel.set_title(f"prompt of {length} tokens", fontsize=10)
    panels[0].set_ylabel("time to first token, s", fontsize=9)
    shown = max(panels, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    shown.legend(frameon=False, fontsize=8, loc="best")
    figure.suptitle(
        f"Time to first token over mini-batches (simulated: {args.profile}; shaded: {named(size)}, the best)",
        fontsize=11,
    )
    return run.save(figure)


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(3, 1), tokens=(1, 1))
    common_flags(parser, "profile")
    parser.add_argument("--lengths", nargs="+", type=positive, default=[16, 128, 512], help="of prompts, in tokens")
    args = parse_flags(parser)
    if args.tokens != 1:
        parser.error("--tokens is no choice here: time to first token is measured")
    return args


def main() -> int:
    args = parse()
    header(f"Mini-batches in prefill, {plural(args.prompts, 'prompt')} of each length")
    store, tokenizer = open_model(args, "float32")
    profile = recorded_runs.fitted(args.profile, store)
    prompts = {n: prompts_of_length(tokenizer, args.prompts, n, args.seed) for n in args.lengths}
    note = f"simulated: {args.profile}"
    depends = {"model": store.manifest.fingerprint}
    with Experiment("sweep_minibatch", args, VERSION, depends, note) as run, KeptCluster(store) as kept:
        sweep = Sweep(args, prompts, profile, run, kept)
        run.all([sweep.recorded(length) for length in args.lengths], sweep.measure, sweep.whole)
        keys = [(length, way, size) for length in args.lengths for way in WAYS for size in SIZES]
        results = run.all([sweep.simulated(key) for key in keys], sweep.measure)
        found = {key: statistics.mean(one["ttft_s"]) for key, one in zip(keys, results, strict=True)}
        size = min(SIZES[:-1], key=lambda one: (round(worse(found, one), 4), one))
        rows = [
            {
                "profile": args.profile,
                "prompt_tokens": length,
                "prefill": way,
                "mini_batch": named(size_),
                "ttft_s": found[length, way, size_],
            }
            for length, way, size_ in keys
        ]
        run.write(rows, best=named(size), worse={named(one): worse(found, one) for one in SIZES})
        report(found, args, size)
        print(run.written([draw(run, found, args, size)]))
    return 0


def report(found: dict[Key, float], args: Any, size: int) -> None:
    """To standard output."""
    for way in WAYS:
        print(f"TTFT, s, {way} (simulated: {args.profile})")
        print("  mini-batch " + "".join(f"{named(one):>8}" for one in SIZES))
        for length in args.lengths:
            print(f"  {length:>4} tokens" + "".join(f"{found[length, way, one]:8.3f}" for one in SIZES))
    print(
        f"best: --mini-batch {named(size)}, {worse(found, size):.3f} times each length's best; "
        f"the scheduler's own choice: {worse(found, OWN):.3f} times, none: {worse(found, 0):.3f} times"
    )


if __name__ == "__main__":
    sys.exit(main())
