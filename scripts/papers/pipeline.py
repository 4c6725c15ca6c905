"""Draws one token through ten nodes, in the manner of the OD-MoE paper's Figs 2 and 5: docs/pipeline.png.

Simulated, not measured: the scheduler's own core on the paper's timings (scheduler/timing/profiles/rtx3090-1gbe.yaml).

    .venv/bin/python -m scripts.papers.pipeline --output docs/pipeline.png
"""

from __future__ import annotations

from pathlib import Path

from odmoe.commands.trace import draw
from scheduler.alignment import LATE
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import find_profile
from scripts.lib.flags import script_parser
from scripts.lib.paths import RESULTS

SHOWN_S = 0.125


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "pipeline.png", help="PNG to write (%(default)s)")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=5, system=SystemConfig(departure=LATE))
    outcome = simulate(scenario, random_workload(scenario, recall=1.0), spans=True)
    start = outcome.token_s[1]
    title = "One token's first layers on ten nodes, aligned every token (simulated on the paper's timings)"
    draw(outcome.spans, start, start + SHOWN_S, title, args.output, "labels: layer.expert, counted from 0")
    print(f"{args.output}: {outcome.decode_tokens_per_s:.2f} tokens/s simulated")


if __name__ == "__main__":
    main()
