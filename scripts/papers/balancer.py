"""How far from the best split are the balancer of importance (Algorithm 2) and HybriMoE's schedule?

    .venv/bin/python -m scripts.papers.balancer
    .venv/bin/python -m scripts.papers.balancer --instances 2000 --json

Random gates: 1 to 8 experts that are not resident, 1 to `batch` rows each, a host that takes `host` of a load's time
for a row. Algorithm 2 against every split, by what it is to make small: the time of all loads, or of the host,
whichever is longer. HybriMoE's schedule likewise, by when device and host are done, with up to 4 experts resident and a
device that takes a hundredth of a load for a row. A ratio of 1 is the best there is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from itertools import product
from random import Random
from statistics import mean
from typing import Any

from scheduler.policies.placement import Balance, Costs, Hybrid
from scripts.lib.flags import script_parser
from scripts.lib.provenance import command, header, machine

Rows = Mapping[int, int]
Takes = Callable[[Rows, Rows, Collection[int], Costs], float]


def unbalanced(missing: Rows, resident: Rows, host: Collection[int], costs: Costs) -> float:
    """Seconds: all loads, or the host's share, whichever is longer."""
    return max(costs.load_s * sum(e not in host for e in missing), sum(costs.host_s(missing[e]) for e in host))


def finished(missing: Rows, resident: Rows, host: Collection[int], costs: Costs) -> float:
    """Seconds until device and host are done: resident ones first, then each load as it comes, the most rows first."""
    device = sum(costs.device_s(rows) for e, rows in resident.items() if e not in host)
    loads = sorted((e for e in missing if e not in host), key=lambda e: -missing[e])
    for place, expert in enumerate(loads, 1):
        device = max(device, place * costs.load_s) + costs.device_s(missing[expert])
    return max(device, sum(costs.host_s({**missing, **resident}[e]) for e in host))


def ratio(rng: Random, split: Balance | Hybrid, takes: Takes, costs: Costs, batch: int, spare: int) -> float:
    """Of one random gate: what the split takes over what the best of all splits takes."""
    missing = {e: rng.randint(1, batch) for e in range(rng.randint(1, 8))}
    resident = {100 + e: rng.randint(1, batch) for e in range(rng.randint(0, spare))}
    movable = [*missing, *resident] if spare else [*missing]
    every = ([e for e, on in zip(movable, bits, strict=True) if on] for bits in product((0, 1), repeat=len(movable)))
    best = min(takes(missing, resident, host, costs) for host in every)
    return takes(missing, resident, split.host(missing, resident, costs, False), costs) / best


def measured(instances: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    kinds: list[tuple[str, Balance | Hybrid, Takes, int]] = [
        ("algorithm 2", Balance(), unbalanced, 0),
        ("hybrimoe", Hybrid(), finished, 4),
    ]
    for name, split, takes, spare in kinds:
        for batch, host in product((1, 4, 16), (0.01, 0.1, 1 / 3, 1.0, 3.0)):
            rng = Random(f"{seed} {name} {batch} {host}")
            costs = Costs(1.0, 0.0, 0.01, 0.0, host)
            count = instances if not spare else max(1, instances // 4)  # twelve to move, not eight
            found = [ratio(rng, split, takes, costs, batch, spare) for _ in range(count)]
            best = sum(r < 1 + 1e-9 for r in found) / count
            rows.append(
                {
                    "split": name, "batch": batch, "host": host, "instances": count,
                    "best": best, "mean": mean(found), "worst": max(found),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--instances", type=int, default=400, help="random gates a row of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    args = parser.parse_args()
    rows = measured(args.instances, args.seed)
    if args.json:
        print(json.dumps({"machine": machine(), "command": command(), "rows": rows}))
        return
    header("Splits against the best of all splits")
    print("| split | batch | host, loads a row | gates | as good as the best | mean ratio | worst ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['split']} | {row['batch']} | {row['host']:.2f} | {row['instances']} "
            f"| {100 * row['best']:.0f} % | {row['mean']:.3f} | {row['worst']:.2f} |"
        )


if __name__ == "__main__":
    main()
