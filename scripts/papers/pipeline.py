"""Draws one token through ten nodes, in the manner of the OD-MoE paper's Figs 2 and 5: docs/pipeline.png.

Simulated, not measured: the scheduler's own core on the paper's timings (scheduler/timing/profiles/rtx3090-1gbe.yaml).

    .venv/bin/python -m scripts.papers.pipeline --output docs/pipeline.png
    .venv/bin/python -m scripts.papers.pipeline --draft 15 --output docs/block.png   # a block of drafts, and a token
"""

from __future__ import annotations

from pathlib import Path

from scheduler.alignment import LATE
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import PROFILE, Scenario
from scheduler.simulation.simulate import Outcome, simulate_requests
from scheduler.timing.profile import find_profile
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import RESULTS
from scripts.papers.timeline import Panel, draw_panels

SHOWN_S, BLOCK_SHOWN_S = 0.125, 0.25
TOKENS = 96


def simulated(tokens: int, draft: int, departure: str | None = None) -> Outcome:
    system = SystemConfig() if departure is None else SystemConfig(departure=departure)
    scenario = Scenario(find_profile(PROFILE), tokens=tokens, draft=draft, system=system)
    return simulate_requests(scenario, random_arrivals(scenario, recall=1.0, same_token=1.0), spans=True)


def panel(outcome: Outcome, number: int, shown_s: float, title: str) -> Panel:
    """From the beginning of a pass on."""
    start = [span.start for span in outcome.spans if span.what == "token"][number]
    return Panel(outcome.spans, start, start + shown_s, title)


def token() -> tuple[list[Panel], list[Outcome]]:
    outcome = simulated(5, 0, LATE)
    title = "One token's first layers on ten nodes, aligned every token (simulated on the paper's timings)"
    return [panel(outcome, 3, SHOWN_S, title)], [outcome]


def block(draft: int) -> tuple[list[Panel], list[Outcome]]:
    """A token without drafts, and a block in the same time."""
    plain, drafted = simulated(TOKENS, 0), simulated(TOKENS, draft)
    blocks, _, gained = drafted.drafted
    rates = [outcome.decode_tokens_per_s or 0.0 for outcome in (plain, drafted)]
    titles = (
        f"Without drafts: {rates[0]:.1f} tokens/s, one a pass (simulated on the paper's timings)",
        f"With drafts: {rates[1]:.1f} tokens/s, {gained / blocks:.0f} a pass",
    )
    outcomes = [plain, drafted]
    return [panel(*one, 5, BLOCK_SHOWN_S, title) for one, title in zip(zip(outcomes), titles, strict=True)], outcomes


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--draft", type=positive, help="draw a block of so many drafts, and a token")
    parser.add_argument("--output", type=Path, default=RESULTS / "pipeline.png", help="PNG to write (%(default)s)")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    panels, outcomes = block(args.draft) if args.draft else token()
    draw_panels(panels, args.output, "labels: layer.expert, counted from 0")
    rates = " and ".join(f"{outcome.decode_tokens_per_s:.2f}" for outcome in outcomes)
    print(f"{args.output}: {rates} tokens/s simulated")


if __name__ == "__main__":
    main()
