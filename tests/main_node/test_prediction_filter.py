"""Predictions that no shadow of ours would send are dropped, and a shadow that sends many is lost."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest

from main_node.prediction_filter import REPEATS, STRAYS, PredictionFilter, Window
from scheduler.errors import LinkError, ProtocolError
from scheduler.types import Predicted
from support.nodes.engine_world import LAYERS, WAIT_S, Desk, Fake, good, rows_of
from wire import messages as w

pytestmark = pytest.mark.timeout(120)
LOOKAHEAD = 2


def predicted(position: int, request: int = 1) -> Predicted:
    return Predicted(request, position, 0, (0, 1))


@dataclass
class Request:
    window: Window


@pytest.fixture
def requests() -> dict[int, Request]:
    """A request with a prompt of five tokens and an answer of at most four."""
    return {1: Request(Window(5, 5 + 4))}


@pytest.fixture
def reach(requests: dict[int, Request]) -> PredictionFilter:
    return PredictionFilter(requests, LOOKAHEAD, 3)


def test_a_shadow_that_is_to_draft_may_be_ahead_by_as_much(
    reach: PredictionFilter, requests: dict[int, Request]
) -> None:
    requests[2] = Request(Window(5, 5 + 40))
    reach.on_announced(2, 3, 9)
    assert [position for position in range(60) if reach.takes(predicted(position, 2))] == list(range(5, 18))
    assert [step for step in range(60) if reach.takes_draft(2, step)] == list(range(14))
    assert not reach.takes_draft(1, 0)  # it was not asked for


def test_a_shadow_whose_drafts_are_all_wrong_is_kept(reach: PredictionFilter, requests: dict[int, Request]) -> None:
    """Each token sends it back, and what it had drafted is predicted and sent again."""
    requests[2] = Request(Window(5, 5 + 400))
    for step in range(400):
        reach.on_announced(2, step, 31)
        for ahead in range(31):
            assert step + ahead >= 400 or all(reach.takes(predicted(5 + step + ahead, 2)) for _ in range(3))
            assert reach.takes_draft(2, step + ahead + 1)


def test_drafts_without_end_are_refused(reach: PredictionFilter) -> None:
    reach.on_announced(1, 0, 2)

    def endless() -> None:
        for _ in range(100_000):
            reach.takes_draft(1, 1)

    with pytest.raises(ProtocolError, match="drafts of no use, the last one for decode pass 1 of request 1"):
        endless()


@pytest.mark.parametrize(
    ("announced", "taken"), [(-1, [5, 6]), (0, [5, 6, 7]), (1, [5, 6, 7, 8]), (2, [5, 6, 7, 8]), (9, [5, 6, 7, 8])]
)
def test_as_far_as_the_shadow_may_be_ahead(reach: PredictionFilter, announced: int, taken: list[int]) -> None:
    reach.on_announced(1, announced)
    reach.on_announced(1, -1)  # never back
    assert [position for position in range(20) if reach.takes(predicted(position))] == taken


def test_requests_that_are_not_open(reach: PredictionFilter, requests: dict[int, Request]) -> None:
    assert not reach.takes(predicted(5, request=2))
    del requests[1]
    reach.on_closed()
    reach.on_announced(1, 3)
    assert not reach.takes(predicted(5))
    assert reach.dropped == 2


def test_not_without_end(reach: PredictionFilter) -> None:
    most = REPEATS * 3 * (LOOKAHEAD + 1)
    assert [reach.takes(predicted(5)) for _ in range(most + 2)] == [True] * most + [False] * 2
    reach.on_announced(1, 1)
    assert reach.takes(predicted(6))


def test_a_shadow_of_many_strays_is_lost(reach: PredictionFilter) -> None:
    most = STRAYS + REPEATS * 3 * (LOOKAHEAD + 2)
    for _ in range(2):  # the next one begins anew
        assert not any(reach.takes(predicted(500)) for _ in range(most))
        with pytest.raises(
            ProtocolError, match=f"has sent {most + 1} predictions of no use, the last one for position 500"
        ):
            reach.takes(predicted(500))


@pytest.mark.slow
def test_the_engine_goes_on_without_such_a_shadow(desk: Desk, caplog: Any) -> None:
    desk.workers(good, good)
    told = desk.shadow()
    desk.open()
    far = [w.Prediction(1, 8 + number, layer, (2, 3), (0.5, 0.5)) for number in range(300) for layer in LAYERS]
    told.say(*far[:50])
    assert desk.core.stats[1].overall.recall is None
    assert desk.engine.peers.shadow is not None
    desk.check(rows_of(1, experts=(0, 1)))
    with pytest.raises(LinkError):
        told.say(*far, *far)
    assert desk.engine.peers.shadow is None
    assert told.closed.wait(WAIT_S)
    assert "the shadow is lost, going on without predictions: it has sent 1097 predictions of no use" in caplog.text
    for layer in LAYERS[1:]:
        desk.check(rows_of(layer), layer)
    assert desk.engine.peers.lost == ["shadow"]


@pytest.mark.slow
def test_memory_stays_where_it_is(desk: Desk) -> None:
    """300 far ones for each honest one, by a shadow that joins again whenever it is lost."""
    desk.workers(good)
    desk.open()
    shadows: list[Fake] = []

    def flood(rounds: int) -> None:
        for number in range(rounds):
            honest = w.Prediction(1, 5 + number % 2, 0, (0, 1), (0.5, 0.5))
            far = [w.Prediction(1, 100 + one, 1, (0, 1), (0.5, 0.5)) for one in range(300)]
            for prediction in (honest, *far):
                if desk.engine.peers.shadow is None:
                    shadows.append(desk.shadow())
                shadows[-1].say(prediction)

    flood(5)
    tracemalloc.start()
    try:
        flood(2)
        before, visits = tracemalloc.get_traced_memory()[0], len(desk.core._state.visits)
        flood(40)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(desk.core._state.visits) == visits
    assert desk.engine.prediction_filter.dropped == 47 * 300
    assert len(shadows) < 15
    assert grown < 2_000_000, "12,000 predictions; of each shadow that joined, what the tests keep of it"
