"""Experts on device and host: random gates and costs, and when both are done."""

from __future__ import annotations

from hypothesis import strategies as st

from scheduler.policies.placement import Costs

DEAR = Costs(load_s=10, device_call_s=1, device_row_s=0, host_call_s=0, host_row_s=3)
SECONDS = st.integers(0, 40)
ROWS = st.dictionaries(st.integers(0, 30), st.integers(1, 12), max_size=7)
COSTS = st.builds(Costs, SECONDS, SECONDS, st.integers(0, 5), SECONDS, st.integers(0, 20))


def ends(missing: dict[int, int], resident: dict[int, int], host: set[int], costs: Costs) -> tuple[float, float]:
    """When device and host are done: resident ones first, then each load as it arrives, the most rows first."""
    device = sum(costs.device_s(n) for e, n in resident.items() if e not in host)
    loads = sorted((e for e in missing if e not in host), key=lambda e: (-missing[e], e))
    for place, expert in enumerate(loads):
        device = max(device, (place + 1) * costs.load_s) + costs.device_s(missing[expert])
    return device, sum(costs.host_s({**missing, **resident}[e]) for e in host)
