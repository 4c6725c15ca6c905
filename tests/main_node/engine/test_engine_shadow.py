"""The engine and a shadow that follows, comes late, goes, or talks nonsense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler import types as t
from support.nodes.engine_world import (
    EXPERTS,
    LAYERS,
    WAIT_S,
    Desk,
    Fake,
    Later,
    good,
    rows_of,
)
from wire import messages as w

pytestmark = pytest.mark.timeout(60)


# --- the shadow -------------------------------------------------------------------------------------------------


def shadow_parts(aligns: list[w.Align]) -> list[tuple[int, int | None, int, int]]:
    return [(m.step, m.token, m.kv_start, m.kv[0].shape[2] if m.kv else 0) for m in aligns]


def test_the_shadow_is_told(desk: Desk) -> None:
    desk.workers(good)
    told = desk.shadow()
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    desk.engine.close_request(1)
    opened = told.wait(w.OpenRequest)
    assert opened == [w.OpenRequest(1, (100, 101, 102, 103, 104), 0, 20, 1, 1, 2, False)]
    assert shadow_parts(told.wait(w.Align, 2)) == [(0, 105, 0, 5), (1, 106, 5, 1)]
    assert told.wait(w.CloseRequest) == [w.CloseRequest(1)]


def test_a_shadow_that_joins_late_takes_up_the_request(desk: Desk) -> None:
    desk.workers(good)
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    desk.engine.post(t.StepStarted((t.Pass(1, 6, 1, prefill=False),)))
    told = desk.shadow()
    assert told.wait(w.OpenRequest) == [w.OpenRequest(1, (100, 101, 102, 103, 104, 105), 1, 20, 1, 1, 2, False)]
    assert shadow_parts(told.wait(w.Align)) == [(1, 106, 0, 6)]
    told.say(w.Prediction(1, 6, 0, (0, 1), (0.6, 0.4)))
    desk.check(rows_of(1, experts=(0, 1)), 0, position=6)
    stats = desk.core.stats[1]
    assert (stats.overall.correct, stats.overall.activated, stats.reloads) == (2, 2, 0)
    desk.engine.post(t.TokenDecoded(1, 2))
    assert shadow_parts(told.wait(w.Align, 2))[1] == (2, 107, 6, 1)


SHADOW_ENDS: dict[str, Callable[[Fake], None]] = {
    "closes": lambda fake: fake.reply.close(),
    "fails": lambda fake: fake.say(w.Failed("RuntimeError", "no memory")),
    "fails a request": lambda fake: fake.say(w.Failed("RuntimeError", "no memory", request=1)),
    "unknown layer": lambda fake: fake.say(w.Prediction(1, 5, 7, (0,), (1.0,))),
    "unknown expert": lambda fake: fake.say(w.Prediction(1, 5, 1, (0, EXPERTS), (0.5, 0.5))),
    "negative expert": lambda fake: fake.say(w.Prediction(1, 5, 1, (0, -1), (0.5, 0.5))),
    "out of turn": lambda fake: fake.say(w.Loaded(1, 1, 0.0)),
}


@pytest.mark.parametrize("name", SHADOW_ENDS)
def test_without_the_shadow_the_request_goes_on(name: str, desk: Desk, caplog: Any) -> None:
    desk.workers(good, good)
    told = desk.shadow()
    desk.open()
    told.say(w.Prediction(1, 5, 0, (0, 1), (0.6, 0.4)))
    desk.check(rows_of(1, experts=(0, 1)), 0)
    SHADOW_ENDS[name](told)
    assert desk.engine.peers.shadow is None
    assert told.closed.wait(WAIT_S)
    assert "the shadow is lost, going on without predictions: " in caplog.text
    for layer in (1, 2):
        desk.check(rows_of(layer), layer)
    desk.engine.post(t.TokenDecoded(1, 1))
    assert desk.engine.wait_for_predictions(1, WAIT_S)
    again = desk.shadow()
    assert again.wait(w.OpenRequest)[0].first_step == 1
    assert desk.engine.peers.shadow is not None


def test_wrong_predictions_cost_only_time(desk: Desk) -> None:
    desk.workers(good, good)
    told = desk.shadow()
    desk.open()
    told.say(
        w.Prediction(99, 5, 0, (0, 1), (0.5, 0.5)),
        w.Prediction(1, 5, 0, (2, 3), (0.5, 0.5)),
        w.Prediction(1, 5, 0, (2, 2), (0.5, 0.5)),
        w.Prediction(1, 5, 1, (), ()),
        w.Prediction(1, 500, 2, (1, 3), (0.5, 0.5)),
        w.Prediction(1, 0, 2, (1, 3), (0.5, 0.5)),
    )
    for layer in LAYERS:
        desk.check(rows_of(layer, experts=(0, 1)), layer)
    assert desk.engine.peers.shadow is not None
    desk.engine.close_request(1)


def test_predictions_are_waited_for_within_a_deadline(desk: Desk) -> None:
    desk.workers(good)
    told = desk.shadow()
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert not desk.engine.wait_for_predictions(1, 0.05)
    waiting = Later(lambda: desk.engine.wait_for_predictions(1, WAIT_S))
    told.say(w.Prediction(1, 5, 0, (0, 3), (0.6, 0.4)))
    assert waiting.result()
    assert desk.core.stats[1].overall.recall == 0.5
