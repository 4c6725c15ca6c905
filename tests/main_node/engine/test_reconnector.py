"""Bringing lost nodes back: how often it is tried, when it ends, and that no loss is missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from main_node.engine.reconnector import Reconnector
from scheduler.errors import LinkError

pytestmark = pytest.mark.timeout(60)

WAIT_S = 30.0


class Site:
    """Nodes that come back at the attempt that `succeeds` says (None: never)."""

    def __init__(self, succeeds: int | None = 1) -> None:
        self.succeeds = succeeds
        self.tried: list[tuple[str, int, float]] = []
        self.changed = threading.Condition()
        self.before: Callable[[int], None] = lambda attempt: None

    def join(self, kind: str, number: int) -> None:
        with self.changed:
            self.tried.append((kind, number, time.monotonic()))
            self.changed.notify_all()
            attempt = sum(t[:2] == (kind, number) for t in self.tried)
        self.before(attempt)
        if self.succeeds is None or attempt < self.succeeds:
            raise LinkError("not yet")

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.tried) >= count, WAIT_S), self.tried


@pytest.fixture
def reconnector_of() -> Iterator[Any]:
    made: list[Reconnector] = []

    def build(site: Site, first_s: float = 0.01, most_s: float = 0.05) -> Reconnector:
        made.append(Reconnector(site.join, first_s, most_s))
        return made[-1]

    yield build
    for reconnector in made:
        reconnector.close()
        assert_idle()


def asking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rejoin")]


def assert_idle() -> None:
    """Nobody is asked any more, soon."""
    for thread in asking():
        thread.join(WAIT_S)
    assert not asking()


def test_asked_until_it_is_back(reconnector_of: Any) -> None:
    site = Site(4)
    reconnector = reconnector_of(site)
    reconnector.on_lost("worker", 2)
    site.wait(4)
    assert_idle()
    assert [tried[:2] for tried in site.tried] == [("worker", 2)] * 4


def test_pauses_double_to_a_bound(reconnector_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    reconnector = reconnector_of(Site(7), 0.5, 10.0)
    monkeypatch.setattr(reconnector, "_pause", lambda pause_s: pauses.append(pause_s) or False)
    reconnector.on_lost("shadow", 0)
    assert_idle()
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_one_that_goes_again_soon_is_asked_less_often(reconnector_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    site = Site(3)
    reconnector = reconnector_of(site, 0.5, 10.0)
    monkeypatch.setattr(reconnector, "_pause", lambda pause_s: pauses.append(pause_s) or False)
    reconnector.on_lost("worker", 0)
    assert_idle()
    site.succeeds = 1
    for number in (0, 0, 1):
        reconnector.on_lost("worker", number)
        assert_idle()
    monkeypatch.setattr("main_node.engine.reconnector.STEADY_S", 0.0)
    reconnector.on_lost("worker", 0)
    assert_idle()
    assert pauses == [0.5, 1.0, 2.0, 1.0, 2.0, 0.5, 0.5]


def test_one_that_kept_requests_waiting_stays_away_as_long_and_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    reconnector = Reconnector(Site().join, 0.5, 3.0, wasted_s=lambda kind, number: 30.0)
    monkeypatch.setattr(reconnector, "_pause", lambda pause_s: pauses.append(pause_s) or False)
    for _ in range(7):
        reconnector.on_lost("worker", 0)
        assert_idle()
    reconnector.close()
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 960.0]


def test_good_service_is_counted_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    reconnector = Reconnector(Site().join)
    monkeypatch.setattr(reconnector, "_pause", lambda pause_s: pauses.append(pause_s) or False)
    for served_s in (0.0, 0.0, 0.0, 61.0, 1000.0):
        for node in reconnector._returned:
            reconnector._returned[node] -= served_s
        reconnector.on_lost("worker", 0)
        assert_idle()
    reconnector.close()
    assert pauses == [0.5, 1.0, 2.0, 2.0, 0.5]


def test_pauses_are_cut_short_while_requests_wait_for_workers() -> None:
    """Also one that is under way when the last worker is lost."""
    site, hurried = Site(None), threading.Event()
    reconnector = Reconnector(site.join, 3600.0, 3600.0, hurried.is_set)
    reconnector.on_lost("worker", 0)
    time.sleep(0.3)
    assert site.tried == []
    hurried.set()
    site.wait(3)
    reconnector.close()
    assert_idle()


def test_one_that_is_stuck_holds_up_no_other(reconnector_of: Any) -> None:
    site = Site()
    thaw = threading.Event()
    site.before = lambda attempt: None if threading.current_thread().name == "rejoin-worker-1" else thaw.wait(WAIT_S)
    reconnector = reconnector_of(site)
    reconnector.on_lost("worker", 0)
    site.wait(1)
    reconnector.on_lost("worker", 1)
    site.wait(2)
    thaw.set()
    assert_idle()


def test_lost_while_it_is_brought_back(reconnector_of: Any) -> None:
    """Its stream broke again before the attempt that had brought it back was over."""
    site = Site()
    reconnector = reconnector_of(site)
    site.before = lambda attempt: reconnector.on_lost("worker", 3) if attempt == 1 else None
    reconnector.on_lost("worker", 3)
    site.wait(2)
    assert_idle()
    assert len(site.tried) == 2
    reconnector.on_lost("worker", 3)
    site.wait(3)


def test_closing_ends_it(reconnector_of: Any) -> None:
    site = Site(None)
    reconnector = reconnector_of(site, 0.01, 1000.0)
    reconnector.on_lost("worker", 0)
    reconnector.on_lost("shadow", 0)
    site.wait(4)
    reconnector.close()
    assert_idle()
    tried = len(site.tried)
    reconnector.on_lost("worker", 1)
    assert not asking()
    assert len(site.tried) == tried
