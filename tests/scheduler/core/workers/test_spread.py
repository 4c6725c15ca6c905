"""Where the experts of layers with several rows are loaded, against a search through all workers and all they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.state import LayerVisit
from scheduler.core.workers import WorkerTable
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.profile import find_profile

SMALL = replace(find_profile("rtx3090-1gbe"), layers=4)


def searched(table: WorkerTable, visit: LayerVisit) -> int:
    """By the definition: the distance, as far as it counts, then the layer's experts, then all prefetches."""
    state = table._state
    counts = state.spread.get(visit.due, {})
    rows = sum(one.tokens for one in state.step.passes.values() if not one.prefill)
    experts = min(state.shape.experts, max(1, rows) * state.shape.top_k)
    turns = max(1, len(table.live) // experts)
    paces = {n: len(table.turns) / table.turns.count(n) / len(table.live) for n in table.live}

    def rank(number: int) -> tuple[float, float, float]:
        worker = state.workers[number]
        pace = paces[number]
        most = max(turns, round(turns * pace))
        dues = [demand.visit.due for demand in worker.queue if not demand.confirmed and not demand.visit.request.absent]
        dues += [user.visit.due for entry in worker.slots if entry is not None for user in entry.users]
        distance = min((abs(due - visit.due) for due in dues), default=most)
        return -min(most, distance) / most, (counts.get(number, 0) + 1) * pace, worker.prefetches * pace

    return min(table._grouping.ring(table.turns, visit.turn), key=rank)


UNEVEN = (1.0, 1.0, 0.5, 1.0, 2.0, 1.0, 0.25, 1.0)


@pytest.mark.parametrize(
    ("requests", "draft", "workers", "speeds"),
    [(3, 0, 8, ()), (2, 3, 8, ()), (1, 4, 16, ()), (2, 0, 24, ()), (2, 3, 8, UNEVEN), (2, 0, 24, UNEVEN * 3)],
)
def test_the_worker_with_least_to_load(
    requests: int, draft: int, workers: int, speeds: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    spread = WorkerTable.spread

    def watched(self: WorkerTable, visit: LayerVisit) -> int:
        assert all(demand.rank == demand.urgency for worker in self._state.workers.values() for demand in worker.queue)
        wanted = searched(self, visit)
        found.append((spread(self, visit), wanted))
        return found[-1][0]

    monkeypatch.setattr(WorkerTable, "spread", watched)
    scenario = Scenario(SMALL, tokens=24, requests=requests, draft=draft, workers=workers, speeds=speeds)
    simulate_requests(scenario, random_arrivals(scenario, 0.9))
    assert len(found) > 100
    assert [worker for worker, _ in found] == [wanted for _, wanted in found]
    assert len(set(found)) > 4
