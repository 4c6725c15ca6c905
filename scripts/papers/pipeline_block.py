"""Draws a token without drafts, and a block of drafts in the same time: docs/block.png.

Simulated, not measured: the scheduler's own core on the paper's timings (scheduler/timing/profiles/rtx3090-1gbe.yaml).

    .venv/bin/python -m scripts.papers.pipeline_block --output docs/block.png
"""

from __future__ import annotations

from pathlib import Path

from odmoe.commands.trace import Panel, draw_panels
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import PROFILE, Scenario
from scheduler.simulation.simulate import Outcome, simulate_requests
from scheduler.timing.profile import find_profile
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import RESULTS

SHOWN_S = 0.25
TOKENS = 96


def simulated(draft: int) -> Outcome:
    scenario = Scenario(find_profile(PROFILE), tokens=TOKENS, draft=draft)
    return simulate_requests(scenario, random_arrivals(scenario, recall=1.0, same_token=1.0), spans=True)


def panel(outcome: Outcome, title: str, passes: int) -> Panel:
    """From the beginning of a pass on; `passes` before it are left out."""
    starts = [span.start for span in outcome.spans if span.what == "token"]
    return Panel(outcome.spans, starts[passes], starts[passes] + SHOWN_S, title)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--draft", type=positive, default=15, help="drafts of a block (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "block.png", help="PNG to write (%(default)s)")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    plain, drafted = simulated(0), simulated(args.draft)
    blocks, _, gained = drafted.drafted
    rates = [outcome.decode_tokens_per_s or 0.0 for outcome in (plain, drafted)]
    panels = [
        panel(plain, f"Without drafts: {rates[0]:.1f} tokens/s, one a pass (simulated on the paper's timings)", 5),
        panel(drafted, f"With drafts: {rates[1]:.1f} tokens/s, {gained / blocks:.0f} a pass", 5),
    ]
    draw_panels(panels, args.output, "labels: layer.expert, counted from 0")
    print(f"{args.output}: {rates[0]:.2f} and {rates[1]:.2f} tokens/s simulated")


if __name__ == "__main__":
    main()
