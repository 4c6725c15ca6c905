"""This engine beside others, on realistic random checkpoints: same weights, same tokens, same memory.

    .venv/bin/python -m scripts.measure.peers            # about an hour on two cores, 40 GB of disk
    .venv/bin/python -m scripts.measure.peers --quick    # three minutes once its checkpoint is made, 6 GB of disk
    .venv/bin/python -m scripts.measure.peers --models gpt-oss-20b qwen3-30b-a3b    # in few bits

Everything fits: Transformers `eager`, accelerate with experts on disk, llama.cpp, and this engine with all experts
cached. A quarter fits: this engine with slots for 25 % of the experts, each system whose answers are exact; then the
fastest of them, llama.cpp and accelerate, each in a control group with the same memory limit. The limit is the peak of
resident memory of the fastest system.

In few bits, this engine with both kernels takes turns with llama.cpp alone: with all experts in memory, and with a
quarter of ours, in a control group each, whose limit is what this engine needs.

Every engine runs in a process of its own and is asked in turns, one at a time, the order rotated. Each turn has its own
random tokens, and every engine is made to decode them, so that routes are the same. Ratios are medians of the turns'
ratios. Model files are dropped from the page cache before a process starts.

llama.cpp needs the optional extra: .venv/bin/python -m pip install -e '.[peers]'
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from odmoe.stores import cache_dir
from scheduler.policies.registry import is_exact
from scheduler.policies.systems import SYSTEMS
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import parse_flags, positive, script_parser
from scripts.lib.ledger import PACKAGES, sources
from scripts.lib.paths import RESULTS
from scripts.lib.provenance import header
from scripts.peers import few_bits, figures, show
from scripts.peers.checkpoints import FEW_BITS, QUICK, SHAPES
from scripts.peers.engines import ACCELERATE, LLAMA
from scripts.peers.figures import BASE, CACHED, CAPPED, FITS, QUARTER
from scripts.peers.groups import Refused, find_groups
from scripts.peers.machine import Machine, llama_missing

VERSION = 1
QUICK_SYSTEMS = (BASE, "static", "hybrimoe")
TOKEN_S = {FITS: 0.1, QUARTER: 0.3, CAPPED: 1.0}
"""About how long a token takes, for the progress bar."""


def exact_systems() -> dict[str, dict[str, Any]]:
    """Settings of every system whose answers are exact, or are so at alpha 0. OD-MoE's shadow is nf4."""
    found: dict[str, dict[str, Any]] = {}
    for name, preset in SYSTEMS.items():
        if name == CACHED or preset.config.placement == "host":
            continue  # there is no second processor
        shadow = {"shadow": "nf4"} if preset.config.predictor == "sep" else {}
        if is_exact(preset.config):
            found[name] = {"system": name, **shadow}
        elif is_exact(replace(preset.config, alpha=0)):
            found[f"{name}, alpha 0"] = {"system": name, "alpha": 0.0, **shadow}
    return found


def plan(args: Any) -> list[Cell]:
    """What does not depend on another cell: pairs with eager, and pairs with on-demand."""
    found = []
    others = [one for one in args.systems if one != BASE] or [BASE]
    for model in _plain(args):
        engines = [CACHED, ACCELERATE] + ([] if args.without_llama else [LLAMA])
        found += [cell(args, model, FITS, one) for one in engines]
        found += [cell(args, model, QUARTER, one) for one in others]
    return found


def plan_few_bits(args: Any) -> list[Cell]:
    """All in memory; and ours alone with a quarter, whose memory is the limit of the cells to come."""
    found = []
    for model in args.models:
        for experts, file in few_bits.PAIRS.get(model, {}).items():
            of_all = few_bits.engines(experts, file, args.without_llama)
            found.append(cell(args, model, FITS, experts, engines=of_all))
            found.append(cell(args, model, QUARTER, experts, engines=few_bits.engines(experts, file, True)))
    return found


def plan_capped(args: Any, cells: list[Cell], results: list[dict[str, Any]]) -> list[Cell]:
    """What is compared in control groups, by the results of the cells before."""
    best = [(model, figures.best_system(model, cells, results)) for model in _plain(args)]
    found = [cell(args, model, CAPPED, one[0], cap=one[1]) for model, one in best if one is not None]
    for of, result in zip(cells, results, strict=True):
        model, experts = of.params["model"], of.params["engine"]
        if model in FEW_BITS and of.params["case"] == QUARTER and (cap := few_bits.cap(result)) is not None:
            engines = few_bits.engines(experts, few_bits.PAIRS[model][experts], args.without_llama)
            found.append(cell(args, model, CAPPED, experts, engines=engines, cap=cap))
    return found


def _plain(args: Any) -> list[str]:
    return [model for model in args.models if model not in FEW_BITS]


def cell(args: Any, model: str, case: str, engine: str, **more: Any) -> Cell:
    shape = args.shapes[model]
    params = {"model": model, "weights": shape.digest(), "case": case, "engine": engine, **more}
    of_all = {"threads": args.threads, "turns": args.turns, "tokens": args.tokens, "seed": args.seed}
    return Cell(params | of_all, cost=20 + TOKEN_S[case] * 2 * (args.turns + 1) * (args.tokens + 4))


def parse() -> Any:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*SHAPES, *FEW_BITS],
        help="A: 64 experts, top-8; B: 8, top-2; or two models in few bits (A B; quick: A)",
    )
    parser.add_argument("--layers", type=positive, help="of a model in few bits, 3 at least (6, quick: 3)")
    parser.add_argument(
        "--systems", nargs="+", choices=exact_systems(), metavar="NAME", help="all exact ones; with --quick three"
    )
    parser.add_argument("--folder", type=Path, default=cache_dir() / "peers", help="for checkpoints (%(default)s)")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(all: %(default)s)")
    parser.add_argument("--turns", type=positive, help="measured turns of each engine (5, quick: 2)")
    parser.add_argument("--tokens", type=positive, help="decoded in each turn (24, quick: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens")
    parser.add_argument("--quick", action="store_true", help="two layers, few systems and turns")
    parser.add_argument("--fresh", action="store_true", help="measure again what is finished")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory to write to (results/)")
    parser.set_defaults(sizes={"turns": (5, 2), "tokens": (24, 6), "layers": (6, 3)})
    args = parse_flags(parser)
    args.shapes = (QUICK if args.quick else SHAPES) | {
        name: replace(shape, name=f"{name}-{args.layers}", layers=args.layers) for name, shape in FEW_BITS.items()
    }
    args.models = args.models or (["A"] if args.quick else list(SHAPES))
    args.systems = list(args.systems or (QUICK_SYSTEMS if args.quick else exact_systems()))
    args.model = ", ".join(f"{name}: {show.described(args.shapes[name])}" for name in args.models)
    args.folder = args.folder.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> int:
    args = parse()
    header("Beside other engines")
    missing = llama_missing()
    args.without_llama = missing is not None
    try:
        groups, refused = find_groups(), None
    except Refused as error:
        groups, refused = None, f"no row with a memory cap: {error}"
    left_out = [text for text in (missing, refused) if text is not None]
    print("\n".join(left_out), file=sys.stderr)
    turns = f"{plural(args.turns, 'turn')} of {args.tokens} tokens"
    kept = "bf16" if len(_plain(args)) == len(args.models) else "in few bits those that say so, else bf16"
    note = "; ".join([f"{kept}, {plural(args.threads, 'thread')}, {turns}", *left_out])
    depends = {"code": sources(*PACKAGES), "llama.cpp": not args.without_llama}
    with Machine(args, exact_systems(), groups) as machine, Experiment("peers", args, VERSION, depends, note) as run:
        cells = plan(args) + plan_few_bits(args)
        results = run.all(cells, machine.measure)
        if groups is not None:
            capped = plan_capped(args, cells, results)
            results += run.all(capped, machine.measure)
            cells += capped
        rows = figures.rows(cells, results)
        run.write(rows, shapes={name: asdict(args.shapes[name]) for name in args.models})
        print(show.table(rows))
        print("\n".join(figures.claims(rows)))
        print(run.written([run.save(show.picture(rows, args))]))
    wrong = [row for row in rows if row.get("agreement") not in (None, 1.0) and row["exact"]]
    for row in wrong:
        print(f"{row['engine']} on {row['model']} is exact, but chose other tokens than eager", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
