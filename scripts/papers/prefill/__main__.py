"""Time to first token (prefill) over the length of the prompt, of every system of one machine; from the disk of every
system.

    .venv/bin/python -m scripts.papers.prefill                      # simulated: some minutes, most of them recording
    .venv/bin/python -m scripts.papers.prefill --host-row-ms 1      # by a processor that takes each row by itself
    .venv/bin/python -m scripts.papers.prefill --how disk --quick   # this machine's own disk and processor

One worker with room for --budgets % of the experts, and, simulated, a host place that computes experts.
Each system answers --history prompts, and then prompts of every length in turns, keeping what it keeps. Ratios are to
on-demand, which loads ahead of its gates; "on-demand, in turn" is the papers' baseline, where nothing overlaps. Medians
over prompts, ratios with an interval of 95 % (five prompts: 94 %).

Simulated: routes and foresight of these prompts are recorded once, natively; the scheduler then runs on them with the
profile's times. Predictors that expect nothing in prefill (those of smoe and importance) are left out, so that the
history's answers prefetch nothing for them.

From the disk: prompt by prompt in a drawn order, with on-demand before and after each of the others. A * marks figures
during which others used more than a tenth of a core.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.timing.profile import Profile, find_profile
from scripts.lib.bench import Bench, in_drawn_order, parse_system_flags, system_flags
from scripts.lib.clusters import KeptCluster, open_model
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, positive
from scripts.lib.ledger import digest, sources
from scripts.lib.prompts import mixed_prompts, prompts_of_length
from scripts.lib.provenance import header
from scripts.papers.compare_systems.__main__ import between, pairs_of
from scripts.papers.prefill import figures, simulated
from scripts.papers.prefill.variants import QUICK, REFERENCE, VARIANTS, WITH_SHADOW, config_of, foresight_of

VERSION = 1
HOWS = ("simulated", "disk")
LENGTHS, QUICK_LENGTHS = [16, 64, 128, 256, 512], [16, 64]


def prompts_of(tokenizer: Any, args: Any) -> list[list[int]]:
    """The history, then every length in turns."""
    of = [prompts_of_length(tokenizer, args.prompts, length, args.seed) for length in args.lengths]
    history = [tokenizer(text)["input_ids"] for _, text in mixed_prompts(args.history, args.seed)]
    return [*history, *(each[n] for n in range(args.prompts) for each in of)]


def profile_of(args: Any) -> Profile:
    """That of a simulation."""
    found = find_profile(args.profile)
    return found if args.host_row_ms is None else replace(found, host_extra_s=args.host_row_ms / 1e3)


# --- simulated --------------------------------------------------------------------------------------------------------


class Simulation:
    """Computes a cell: a recording, or all answers of a variant."""

    def __init__(self, args: Any, run: Experiment, kept: KeptCluster, tokenizer: Any) -> None:
        self._args, self._run, self._kept = args, run, kept
        self._prompts = prompts_of(tokenizer, args)
        self._read: Any = None

    @property
    def recorded(self) -> Cell:
        of = {"predictor": simulated.PREDICTOR, "prompts": digest(self._prompts), "tokens": self._args.tokens}
        return Cell({"how": "recorded", **of}, 0.02 * sum(map(len, self._prompts)) + 5)

    def answered(self, variant: str) -> Cell:
        of = {"system": variant, **VARIANTS[variant], "budget": self._args.budget}
        of |= {"timings": digest(profile_of(self._args)), "scheduler": sources("scheduler")}
        return Cell({**self.recorded.params, **of, "how": "simulated", "variant": variant}, 3.0, ("scheduler",))

    @property
    def _path(self) -> Path:
        return Path(self._run.path(self.recorded.params, ".recording"))

    def whole(self, params: dict[str, Any]) -> bool:
        """A recording may have been removed."""
        return params["how"] != "recorded" or self._path.is_file()

    def measure(self, params: dict[str, Any]) -> dict[str, Any]:
        args = self._args
        if params["how"] == "recorded":
            return simulated.record(self._kept, args.model, self._prompts, args.tokens, self._path)
        self._read = self._read or simulated.read(self._path)
        name = params["variant"]
        of = config_of(name), foresight_of(name)
        return {"answers": simulated.figures(self._read, profile_of(args), *of, args.budget)}

    def rows(self) -> list[dict[str, Any]]:
        args = self._args
        self._run.all([self.recorded], self.measure, self.whole)
        results = self._run.all([self.answered(name) for name in args.systems], self.measure)
        answers = {name: one["answers"][args.history :] for name, one in zip(args.systems, results, strict=True)}
        base = answers.get(REFERENCE)
        made = []
        for name in args.systems:
            for at, length in enumerate(args.lengths):
                mine = answers[name][at :: len(args.lengths)]
                near = base[at :: len(args.lengths)] if base else [None] * len(mine)
                ratios = [one["ttft_s"] / b["ttft_s"] if b else None for one, b in zip(mine, near, strict=True)]
                made.append(figures.row_of(_fixed(args, name, length), mine, ratios))
        return made


def _fixed(args: Any, name: str, length: int) -> dict[str, Any]:
    how = args.how if args.how == "disk" else f"{args.how}: {args.profile}"
    how += f", {args.host_row_ms:g} ms a row on the host" if args.host_row_ms is not None else ""
    return {"model": Path(args.model).name, "how": how, "budget": args.budget, "system": name, "prompt_tokens": length}


# --- from the disk --------------------------------------------------------------------------------------


class LengthBench(Bench):
    """Its prompts are of every length, in turns, each by itself."""

    def prompts(self, model: str) -> list[list[list[int]]]:
        return [[one] for one in prompts_of(self.opened(model)[1], self.args)]


def plan(bench: Bench, args: Any) -> list[Cell]:
    """Prompt by prompt every system, on-demand before and after each of the others."""
    of = {
        **bench.identity(args.models[0]),
        "how": args.how,
        "dtype": args.dtype,
        "tokens": args.tokens,
        "history": args.history,
        "prompts": digest(bench.prompts(args.models[0])),
        "budget": args.budget,
    }
    wanted = []
    for n in range(args.prompts * len(args.lengths)):
        drawn = in_drawn_order(args.systems, args.seed, of["model"], n)
        wanted += [
            Cell({**of, **bench.variants[name], "prompt": n, "place": place, "system": name}, 3.0)
            for place, name in enumerate(between(drawn))
        ]
    return wanted


def measured(bench: Bench, run: Experiment, args: Any) -> list[dict[str, Any]]:
    """Rows of what was timed."""

    def measure(params: dict[str, Any]) -> dict[str, Any]:
        place = params["place"] if params["system"] == REFERENCE else 0
        return bench.answer(args.models[0], params["system"], args.budget, params["prompt"], place)

    wanted = plan(bench, args)
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for cell, result in zip(wanted, run.all(wanted, measure), strict=True):
        found.setdefault((cell.params["system"], cell.params["prompt"]), {})[cell.params["place"]] = result
    made = []
    for name in args.systems:
        for at, length in enumerate(args.lengths):
            answers, ratios = [], []
            for n in range(at, args.prompts * len(args.lengths), len(args.lengths)):
                far = 2 if name == REFERENCE else 1
                for one, near in pairs_of(found[name, n], found.get((REFERENCE, n), {}), far):
                    busy = max(figures.show.others_cores({n: [(one, near)]}), default=0.0)
                    answers.append(one | {"beside_cores": busy})
                    ratios.append(figures.show.over("ttft_s", one, near) if "ttft_s" in one else None)
            made.append(figures.row_of(_fixed(args, name, length), answers, ratios))
    return made


# --- the script -------------------------------------------------------------------------------------------------------


def parse() -> Any:
    parser = system_flags(__doc__ or "", prompts=(3, 1), tokens=(4, 2), budgets=(25,))
    parser.add_argument("--how", choices=HOWS, default=HOWS[0], help="%(default)s unless said")
    parser.add_argument(
        "--lengths", nargs="+", type=positive, help="of prompts, in tokens; 16 64 128 256 512 unless said"
    )
    common_flags(parser, "profile", profile="rtx3090-pcie3")
    parser.add_argument("--host-row-ms", type=float, help="simulated: each further row of the host, not the profile's")
    every = VARIANTS | WITH_SHADOW
    parser.add_argument("--systems", nargs="+", choices=every, metavar="NAME", help=f"of {', '.join(every)}")
    args = parse_system_flags(parser)
    if len(args.models) != 1 or len(args.budgets) != 1:
        parser.error("--models and --budgets take one each here")
    if args.host_row_ms is not None and (args.how != "simulated" or args.host_row_ms < 0):
        parser.error(f"--host-row-ms is {args.host_row_ms:g}; allowed: at least 0, with --how simulated")
    if args.how != "disk" and (shadows := [name for name in args.systems or () if name in WITH_SHADOW]):
        parser.error(f"--systems has {', '.join(shadows)}, which have a shadow; they are measured with --how disk")
    args.budget, args.model = args.budgets[0], args.models[0]
    args.lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
    args.systems = args.systems or list(QUICK if args.quick else every if args.how == "disk" else VARIANTS)
    return args


def main() -> int:
    args = parse()
    header(f"Time to first token of {plural(len(args.systems), 'system')}, {args.how}, {args.lengths} tokens")
    name = f"prefill-{args.how}" + (f"-host-{args.host_row_ms:g}ms" if args.host_row_ms is not None else "")
    note = f"device memory {args.budget} % of the experts"
    if args.how != "disk":
        note = f"{args.how}: {args.profile}; {note}"
    if args.how == "simulated":
        store, tokenizer = open_model(args, args.dtype)
        depends = {"model": store.manifest.fingerprint}
        with Experiment(name, args, VERSION, depends, note) as run, KeptCluster(store) as kept:
            return _tell(run, Simulation(args, run, kept, tokenizer).rows(), args)
    variants = {system: (VARIANTS | WITH_SHADOW)[system] for system in args.systems}
    named = Namespace(**vars(args) | {"model": Path(args.model).name})
    with LengthBench(args, variants) as bench, Experiment(name, named, VERSION, {}, note) as run:
        return _tell(run, measured(bench, run, args), args)


def _tell(run: Experiment, rows: list[dict[str, Any]], args: Any) -> int:
    claims = figures.claims(rows)
    run.write(rows, claims=claims)
    print(figures.text(rows))
    print("\n".join(claims))
    title = f"{Path(args.model).name}, {args.budget} % of the experts, {rows[0]['how']}"
    title += f"; medians of {plural(args.prompts, 'prompt')}"
    print(run.written([run.save(figures.picture(rows, title))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
