"""The papers' figures, drawn again one after the other by their scripts: `make figures`, or `make figures QUICK=1`.

    .venv/bin/python -m scripts.figures --quick             # all of them, small: half an hour
    .venv/bin/python -m scripts.figures recall table2       # two of them, whole
    .venv/bin/python -m scripts.figures --publish           # all of them, whole, into docs/: a night

Each goes to a folder of its own in results/figures. A script that fails or takes too long does not keep the others from
being run; the exit code is then 1. --publish puts what was drawn into docs/, its data into docs/data, and writes the
docs' tables again (scripts.publish).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scripts import publish
from scripts.lib.flags import script_parser
from scripts.lib.paths import RESULTS, ROOT
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table

QUICK_LIMIT_S, LIMIT_S = 900.0, 6 * 3600.0
"""For one script."""


@dataclass(frozen=True, slots=True)
class Figure:
    script: str
    """Of scripts.papers."""
    of: str
    """What the papers call it."""
    flags: str = ""
    whole: str = ""
    """More flags, without --quick only: how much is measured."""
    quick: str = "--quick"


STEP_BY_STEP = {"importance": "importance Fig 16", "fate": "Fate Fig 14", "smoe": "SMOE Figs 14, 15"}
WIDE, LONG = "--widen 16 --dtype bfloat16 --budgets 25", "--prompts 5 --tokens 24 --history 1"
"""From the disk: experts that are worth caching."""
TTFT = "--prompts 5 --history 1 --tokens 2"
PC, SHORT = "--profile rtx3090-pcie3@8 --budgets 25", "--prompts 5 --tokens 8 --history 1"
FEW = "--quick --prompts 1 --tokens 4"
"""Emulated, eight times as slow."""

FIGURES = {
    "pipeline": Figure("pipeline", "OD-MoE Figs 2, 5", quick=""),
    "recall": Figure("recall", "OD-MoE Figs 3, 6", whole="--prompts 3 --tokens 64"),
    "ablation": Figure(
        "ablation",
        "OD-MoE Fig 8",
        whole="--how simulated --prompts 3 --tokens 128",
        quick="--quick --how simulated",
    ),
    "sweep_alignment_int8": Figure("sweep_alignment", "OD-MoE Figs 9, 10", "--shadow int8", "--prompts 2 --tokens 64"),
    "sweep_alignment_nf4": Figure("sweep_alignment", "OD-MoE Figs 9, 10", "--shadow nf4", "--prompts 2 --tokens 64"),
    "sweep_minibatch": Figure("sweep_minibatch", "OD-MoE Fig 7", whole="--prompts 2"),
    "table2": Figure(
        "table2",
        "OD-MoE Table 2",
        whole="--prompts 1 --tokens 64 --outputs 64 --problems 4 --text-tokens 128",
    ),
    "prediction": Figure("prediction", "Fate Table 1, Fig 7; SMOE Fig 3; importance Fig 18", "--model models/many-moe"),
    "routing": Figure(
        "routing", "importance Figs 4, 11; SMOE Figs 5, 6; Fate Fig 8", quick="--quick --models models/many-moe"
    ),
    "prefill": Figure("prefill", "SMOE Figs 10, 11; Fate Fig 11; importance Fig 14", whole=TTFT),
    "prefill-simulated-host-1ms": Figure(
        "prefill",
        "the same with the host of the importance paper",
        "--host-row-ms 1 --systems on-demand ktransformers smoe static hybrimoe",
        TTFT,
    ),
    "prefill-disk": Figure(
        "prefill",
        "SMOE Fig 10; Fate Fig 11; importance Fig 14, from the disk",
        "--how disk --widen 16 --dtype bfloat16 --systems on-demand importance smoe fate hybrimoe static moe-infinity "
        "eap od-moe sep-arc",
        TTFT,
        "--quick --lengths 16 64 --prompts 1",
    ),
    "quality_systems": Figure(
        "quality_systems",
        "importance Table 3; Fate Tables 2, 3",
        whole="--models models/fine-moe models/demo-moe --alphas 0 0.1 0.3 0.6 --forms int4 int2 popular mixed "
        "--text-tokens 768 --problems 1 --prompts 1 --tokens 32",
    ),
    "compare_systems": Figure(
        "compare_systems",
        "importance Figs 12, 13; SMOE Table I; Fate Fig 12",
        "--widen 16 --dtype bfloat16 --budgets 10 25 50",
        "--prompts 6 --tokens 32 --history 1",
    ),
    "compare_systems-batch3": Figure(
        "compare_systems",
        "importance Figs 12, 13: batch 3, from the disk",
        f"{WIDE} --batch 3",
        "--systems on-demand static moe-infinity hybrimoe importance smoe fate --prompts 5 --tokens 16 --history 1",
        f"{FEW} --systems on-demand importance",
    ),
    "compare_systems-total": Figure(
        "compare_systems",
        "Fate Fig 13: equal totals of memory",
        "--widen 16 --dtype bfloat16 --total --budgets 60 80",
        "--systems on-demand hybrimoe importance smoe fate sep-arc od-moe --prompts 5 --tokens 16 --history 1",
        f"{FEW} --systems on-demand importance",
    ),
    "compare_systems-flex": Figure(
        "compare_systems",
        "SMOE-Flex in answers that give it time to settle",
        f"{WIDE} --systems on-demand smoe smoe-flex",
        "--prompts 5 --tokens 128 --history 1",
        FEW,
    ),
    "compare_systems-emulated": Figure(
        "compare_systems",
        "importance Figs 12, 13; SMOE Table I; Fate Fig 12, emulated",
        f"{PC} --systems on-demand static ktransformers moe-infinity eap hybrimoe importance smoe fate",
        SHORT,
        FEW,
    ),
    "compare_systems-emulated-batch3": Figure(
        "compare_systems",
        "importance Figs 12, 13: batch 3, emulated",
        f"{PC} --batch 3 --systems on-demand static moe-infinity hybrimoe importance",
        SHORT,
        FEW,
    ),
    **{
        f"ablation_{paper}": Figure("ablation_systems", of, f"--paper {paper} --how disk {WIDE}", LONG)
        for paper, of in STEP_BY_STEP.items()
    },
    **{
        f"ablation_{paper}-emulated": Figure("ablation_systems", of, f"--paper {paper} --how emulated {PC}", SHORT, FEW)
        for paper, of in STEP_BY_STEP.items()
    },
}
"""Name of the data and of the picture -> how it is made."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    of: str
    took_s: float
    why: str
    """It is not there; empty if it is."""
    folder: Path


def draw(name: str, quick: bool, folder: Path) -> Run:
    """Runs the script, for as long as it may take."""
    figure = FIGURES[name]
    out = folder / (f"{name}-quick" if quick else name)
    out.mkdir(parents=True, exist_ok=True)
    place = ["--output", str(out / f"{name}.png")] if figure.script == "pipeline" else ["--out", str(out)]
    words = [*figure.flags.split(), *(figure.quick if quick else figure.whole).split(), *place]
    began, why = time.monotonic(), ""
    limit = QUICK_LIMIT_S if quick else LIMIT_S
    try:
        subprocess.run(
            [sys.executable, "-m", f"scripts.papers.{figure.script}", *words], cwd=ROOT, check=True, timeout=limit
        )
    except subprocess.CalledProcessError as error:
        why = f"exit code {error.returncode}"
    except subprocess.TimeoutExpired:
        why = f"not ended after {limit:.0f} s"
    return Run(name, figure.of, time.monotonic() - began, why, out)


def put_into_docs(run: Run) -> list[Path]:
    """Its data, and those of its pictures that docs/ has, under the figure's name."""
    script, found = FIGURES[run.name].script, []

    def under(stem: str) -> str:
        return stem if stem.startswith(run.name) else stem.replace(script, run.name, 1)

    for result in sorted(run.folder.glob("*.json")):
        found.append(publish.copy(result, under(result.stem)))
    for picture in sorted(run.folder.glob("*.png")):
        place = ROOT / "docs" / f"{under(picture.stem)}.png"
        if place.exists():
            shutil.copy(picture, place)
            found.append(place)
    return found


COLUMNS = (
    Column("figure", "name"),
    Column("of", "of"),
    Column("s", "took_s", ".0f"),
    Column("pictures", lambda row: ", ".join(sorted(path.name for path in row["folder"].glob("*.png")))),
    Column("why not", "why"),
)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="FIGURE", help=f"all unless said: {', '.join(FIGURES)}")
    parser.add_argument("--quick", action="store_true", help="small")
    parser.add_argument("--publish", action="store_true", help="into docs/ as well")
    parser.add_argument("--out", type=Path, default=RESULTS / "figures", help="results/figures unless said")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in FIGURES]:
        parser.error(f"FIGURE is {unknown[0]}; allowed: {', '.join(FIGURES)}")
    if args.quick and args.publish:
        parser.error("--publish is for whole runs: leave out --quick")
    names = args.names or list(FIGURES)
    header(f"{len(names)} of the papers' figures{', small' if args.quick else ''}")
    runs = []
    for count, name in enumerate(names, 1):
        print(f"\n## {count} of {len(names)}: {name} ({FIGURES[name].of})", flush=True)
        runs.append(draw(name, args.quick, args.out.resolve()))
        if args.publish and not runs[-1].why:
            print(f"published: {', '.join(str(path.relative_to(ROOT)) for path in put_into_docs(runs[-1]))}")
    rows = [{name: getattr(run, name) for name in ("name", "of", "took_s", "why", "folder")} for run in runs]
    print(f"\n{text_table(COLUMNS, rows)}\nwritten: {args.out}, in {sum(run.took_s for run in runs) / 60:.1f} min")
    if args.publish:
        publish.write_tables()
    return int(any(run.why for run in runs))


if __name__ == "__main__":
    sys.exit(main())
