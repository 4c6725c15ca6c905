"""What homes are worth to caches: hit rates of a store in parts with homes and without, and Belady's bound.

.venv/bin/python -m scripts.simulated.homes                      # a minute
.venv/bin/python -m scripts.simulated.homes --slots 16 --residency lfu
"""

from __future__ import annotations

import math
from typing import Any

import scheduler.core.workers
from odmoe.api.simulation.scenarios import runs_of
from odmoe.settings.simulate_settings import SimulateSettings
from scheduler.simulation.simulate import simulate_requests
from scripts.lib.flags import script_parser

WORKERS, REPLICAS, TOKENS = 8, 2, 64
ROW = "{:>5} {:<12} {:>12} {:>7} {:>9} {:>7}"


def hit_rates(residency: str, slots: int, replicas: int | None, away: float) -> tuple[float, float]:
    """Of the experts chosen in decoding, the share that was in a slot; and as Belady's eviction has it. `away`: see
    `scheduler.core.workers.AWAY`; -inf: no homes."""
    scheduler.core.workers.AWAY = away
    given: dict[str, Any] = {"residency": residency, "predictor": "none", "slots": slots, "replicas": replicas}
    (run,) = runs_of(SimulateSettings(workers=WORKERS, tokens=TOKENS, **given))
    misses = simulate_requests(run.scenario, run.arrivals).misses
    if misses is None:
        raise SystemExit(f"--residency {residency} keeps no expert; give one that does, such as lru")
    profile = run.scenario.profile
    chosen = (TOKENS - 1) * profile.layers * profile.top_k
    return 1 - misses.total / chosen, 1 - misses.optimal / chosen


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--residency", nargs="+", default=["lru", "lfu", "arc", "s3-fifo", "least-stale"])
    asked = parser.parse_args()
    away = scheduler.core.workers.AWAY
    print(f"simulated: {WORKERS} workers, {REPLICAS} replicas, on-demand loads, {TOKENS} tokens")
    print(ROW.format("slots", "residency", "all hold all", "homes", "no homes", "Belady"))
    for slots in asked.slots:
        for residency in asked.residency:
            cases = ((None, away), (REPLICAS, away), (REPLICAS, -math.inf))
            rates = [hit_rates(residency, slots, *case) for case in cases]
            shown = [f"{rate:.3f}" for rate in (*(rate for rate, _ in rates), rates[0][1])]
            print(ROW.format(slots, residency, *shown), flush=True)


if __name__ == "__main__":
    main()
