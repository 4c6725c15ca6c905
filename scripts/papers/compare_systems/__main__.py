"""Every system on the same prompts, on one machine whose device memory is too small, with real disk loads.

    .venv/bin/python -m scripts.papers.compare_systems           # models/many-moe, an hour or two
    .venv/bin/python -m scripts.papers.compare_systems --quick   # some minutes
    .venv/bin/python -m scripts.papers.compare_systems --models models/demo-moe --systems fate eap --budgets 25
    .venv/bin/python -m scripts.papers.compare_systems --total --budgets 50 75 100   # equal totals, shadows counted
    .venv/bin/python -m scripts.papers.compare_systems --batch 3 --profile rtx3090-pcie3@16   # importance's main figure

An expert of these models loads faster than a message is handled; scripts.models.widen makes the same model with larger
ones, whose loads are worth sparing.

One worker; experts are read from the disk into as many slots as the budget has room for. Beside them Transformers with
every expert in memory. Each cluster first answers --history prompts, which are not measured; then, prompt by prompt,
every system answers the same one, in an order drawn anew, and on-demand answers it before and after each of them. A
ratio is that to the two answers of on-demand next to it. Figures are medians over prompts, ratios with an interval of
95 % (five prompts: 94 %). A * marks figures during which others used more than a tenth of a core, also while an answer
was given that they are divided by.

With --batch several prompts are answered at once in place of one. TPOT is then the time of a pass, which gives each of
them a token; a ratio is that to on-demand's at the same batch, and Transformers answers them one after the other. With
--profile all times are those of a profile, that of a GPU with a CPU beside it for one: so static, ktransformers,
hybrimoe, smoe and importance have the two places to compute at for which they were made. @16 after a profile's name
makes everything sixteen times as long, for a machine that cannot keep up; what is shown are the profile's own times.
"""

from __future__ import annotations

import sys
from typing import Any

from scheduler.policies.systems import SYSTEMS
from scripts.lib import quality
from scripts.lib.bench import Bench, batch_flag, batch_suffix, in_drawn_order, parse_system_flags, system_flags
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.provenance import header
from scripts.papers.compare_systems import show

VERSION = 4
REFERENCE = "on-demand"
NEAR_S = 300.0
"""On-demand's answer counts as next to another if both were given within this time."""
QUICK = ("on-demand", "importance", "smoe", "fate", "hybrimoe", "eap", "static", "fully-cached")


def plan(bench: Bench, args: Any) -> list[Cell]:
    """Transformers' answers, then budget by budget and prompt by prompt every system's."""
    wanted = []
    for model in args.models:
        of = bench.conditions(model) | ({"profile": args.profile} if args.profile else {})
        wanted += [Cell({**of, "system": show.TRANSFORMERS, "prompt": n}, 0.5) for n in range(args.prompts)]
        for budget in args.budgets:
            for n in range(args.prompts):
                drawn = in_drawn_order(args.systems, args.seed, of["model"], budget, n)
                cost = 2.0 * (1 + (args.history if n == 0 else 0))
                wanted += [
                    Cell(
                        {**of, "budget": budget, "prompt": n, "place": place, "system": name, **SYSTEMS[name].values()},
                        cost,
                    )
                    for place, name in enumerate(drawn if args.profile else between(drawn))
                ]
    return wanted


def between(drawn: list[str]) -> list[str]:
    """The reference before and after each of the others; as drawn if it is not among them."""
    if REFERENCE not in drawn:
        return drawn
    others = [name for name in drawn if name != REFERENCE]
    return [REFERENCE, *(each for name in others for each in (name, REFERENCE))]


def measure(bench: Bench, params: dict[str, Any]) -> dict[str, Any]:
    if params["system"] == show.TRANSFORMERS:
        return bench.reference(params["path"], params["prompt"])
    place = params["place"] if params["system"] == REFERENCE else 0
    return bench.answer(params["path"], params["system"], params["budget"], params["prompt"], place)


Answers = dict[int, dict[str, Any]]
"""By place."""


def rows(wanted: list[Cell], results: list[dict[str, Any]], args: Any) -> list[dict[str, Any]]:
    """One row a model, budget and system, over the prompts."""
    found: dict[tuple[str, int | None, str], dict[int, Answers]] = {}
    for one, result in zip(wanted, results, strict=True):
        params = one.params
        key = params["model"], params.get("budget"), params["system"]
        found.setdefault(key, {}).setdefault(params["prompt"], {})[params.get("place", 0)] = result
    made = []
    for model in dict.fromkeys(key[0] for key in found):
        truth = {n: of[0] for n, of in found[model, None, show.TRANSFORMERS].items()}
        made += [] if args.profile else [show.peer_row(model, list(truth.values()))]
        for budget in args.budgets:
            base = found.get((model, budget, REFERENCE), {})
            made += [
                _row(model, budget, name, found[model, budget, name], base, truth)
                for name in SYSTEMS
                if (model, budget, name) in found
            ]
    return made


def _row(
    model: str, budget: int, name: str, of: dict[int, Answers], base: dict[int, Answers], truth: dict[int, Any]
) -> dict[str, Any]:
    every = [one for n in sorted(of) for one in of[n].values()]
    refused = next((one["refused"] for one in every if "refused" in one), None)
    row = {"model": model, "budget": budget, "system": name}
    if refused is not None:
        return {**row, "refused": refused}
    same, total = quality.agreement(
        [one["token_ids"] for one in every], [truth[n]["token_ids"] for n in sorted(of) for _ in of[n]]
    )
    far = 2 if name == REFERENCE else 1
    pairs = {n: pairs_of(of[n], base.get(n, {}), far) for n in sorted(of)}
    return {**row, **show.figures(of, pairs), "same_tokens": same, "tokens": total}


def pairs_of(of: Answers, base: Answers, far: int = 1) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each answer of a system to one prompt, and those of the reference next to it. `far`: places between them; of the
    reference itself 2, and its ratio to itself shows how much the machine varies. Emulated times do not: there the
    reference answers once, and that is next to everything."""
    if any(one.get("emulated") for one in base.values()):
        return [(one, list(base.values())) for _, one in sorted(of.items())]
    return [
        (one, [near for at in (place - far, place + far) if (near := base.get(at)) and _near(one, near)])
        for place, one in sorted(of.items())
    ]


def _near(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Not before and after an interruption of the script."""
    return "tpot_s" in other and abs(one["at"] - other["at"]) < NEAR_S


def parse() -> Any:
    parser = system_flags(__doc__ or "", prompts=(6, 2), tokens=(64, 16))
    parser.add_argument(
        "--total",
        action="store_true",
        help="budgets are of the whole model, and for all that the nodes hold: shadow, dense weights, KV caches, ...",
    )
    batch_flag(parser)
    parser.add_argument("--profile", help="emulate this hardware in place of this machine's own times")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        metavar="NAME",
        help=f"all unless said, with --quick some; there are: {', '.join(SYSTEMS)}",
    )
    args = parse_system_flags(parser)
    args.systems = args.systems or list(QUICK if args.quick else SYSTEMS)
    return args


def main() -> int:
    args = parse()
    header(
        f"{len(args.systems)} systems, {plural(args.prompts, 'prompt')}, answers of {args.tokens}, budgets "
        + ", ".join(f"{one} %" for one in args.budgets)
    )
    emulated = {"profile": args.profile} if args.profile else {}
    with Bench(args, {name: {"system": name, **emulated} for name in args.systems}, args.total) as bench:
        note = f"one worker; experts {bench.reads(args.models[0])}; {args.dtype}"
        note += "; budgets for all that the nodes hold" if args.total else ""
        note += f"; {args.batch} prompts at once" if args.batch > 1 else ""
        note += f"; emulated: {args.profile}" if args.profile else ""
        name = "compare_systems" + "-total" * args.total + "-emulated" * bool(args.profile) + batch_suffix(args.batch)
        with Experiment(name, args, VERSION, {}, note) as run:
            wanted = plan(bench, args)
            results = run.all(wanted, lambda params: measure(bench, params))
            found = rows(wanted, results, args)
            claims = show.claims(found)
            run.write(found, claims=claims)
            show.tables(found, args.total, args.batch)
            print("\n".join(claims))
            print(run.written([run.save(show.picture(found, args))]))
    wrong = [row for row in found if row.get("exact") and row["same_tokens"] != row["tokens"]]
    for row in wrong:
        print(
            f"{row['system']} at {row['budget']} % of {row['model']} is exact, but other tokens came", file=sys.stderr
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
