"""Bringing lost nodes back: how often it is tried, when it ends, and that no loss is missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from main_node.engine.keeper import Keeper
from scheduler.errors import LinkError

pytestmark = pytest.mark.timeout(60)

WAIT_S = 15.0


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
def keeper_of() -> Iterator[Any]:
    made: list[Keeper] = []

    def build(site: Site, first_s: float = 0.01, most_s: float = 0.05) -> Keeper:
        made.append(Keeper(site.join, first_s, most_s))
        return made[-1]

    yield build
    for keeper in made:
        keeper.close()
        assert_idle(keeper)


def assert_idle(keeper: Keeper) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(thread.name.startswith("rejoin") for thread in keeper._threads):
        assert time.monotonic() < deadline, keeper._threads
        time.sleep(0.01)


def test_asked_until_it_is_back(keeper_of: Any) -> None:
    site = Site(4)
    keeper = keeper_of(site)
    keeper.lost("worker", 2)
    site.wait(4)
    assert_idle(keeper)
    assert [tried[:2] for tried in site.tried] == [("worker", 2)] * 4


def test_pauses_double_to_a_bound(keeper_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    keeper = keeper_of(Site(7), 0.5, 10.0)
    monkeypatch.setattr(keeper.closing, "wait", lambda pause_s: pauses.append(pause_s) or False)
    keeper.lost("shadow", 0)
    assert_idle(keeper)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_one_that_goes_again_soon_is_asked_less_often(keeper_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    site = Site(3)
    keeper = keeper_of(site, 0.5, 10.0)
    monkeypatch.setattr(keeper.closing, "wait", lambda pause_s: pauses.append(pause_s) or False)
    keeper.lost("worker", 0)
    assert_idle(keeper)
    site.succeeds = 1
    for number in (0, 0, 1):
        keeper.lost("worker", number)
        assert_idle(keeper)
    monkeypatch.setattr("main_node.engine.keeper.STEADY_S", 0.0)
    keeper.lost("worker", 0)
    assert_idle(keeper)
    assert pauses == [0.5, 1.0, 2.0, 1.0, 2.0, 0.5, 0.5]


def test_one_that_is_stuck_holds_up_no_other(keeper_of: Any) -> None:
    site = Site()
    thaw = threading.Event()
    site.before = lambda attempt: None if threading.current_thread().name == "rejoin-worker-1" else thaw.wait(WAIT_S)
    keeper = keeper_of(site)
    keeper.lost("worker", 0)
    site.wait(1)
    keeper.lost("worker", 1)
    site.wait(2)
    thaw.set()
    assert_idle(keeper)


def test_lost_while_it_is_brought_back(keeper_of: Any) -> None:
    """Its stream broke again before the attempt that had brought it back was over."""
    site = Site()
    keeper = keeper_of(site)
    site.before = lambda attempt: keeper.lost("worker", 3) if attempt == 1 else None
    keeper.lost("worker", 3)
    site.wait(2)
    assert_idle(keeper)
    assert len(site.tried) == 2
    keeper.lost("worker", 3)
    site.wait(3)


def test_closing_ends_it(keeper_of: Any) -> None:
    site = Site(None)
    keeper = keeper_of(site, 0.01, 1000.0)
    keeper.lost("worker", 0)
    keeper.lost("shadow", 0)
    site.wait(4)
    keeper.close()
    assert_idle(keeper)
    tried = len(site.tried)
    keeper.lost("worker", 1)
    assert not keeper._threads
    assert len(site.tried) == tried
