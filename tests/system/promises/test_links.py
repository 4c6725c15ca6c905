"""Links that are cut, slow or lose what passes one way."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from support.promises import BUSY_S

pytestmark = pytest.mark.system

SILENT_S = 1.5


@pytest.mark.parametrize("ways", [("there", "back"), ("there",), ("back",)])
def test_a_link_is_cut(ways: tuple[str, ...], nodes: Any, answer: Any) -> None:
    """As a cable that is pulled, or a network that passes nothing one way: no end of the connection hears of it."""
    relays = nodes.relays()
    cluster = nodes.cluster(relays=relays)
    seen = answer(cluster, {5: lambda: relays[1].cut(*ways)})
    nodes.check_same(seen)
    assert cluster.lost == ["worker 1"]
    assert seen.longest_gap_s < SILENT_S + BUSY_S
    relays[1].mend()
    nodes.check_same(answer(cluster))


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_link_loses_packets_one_way(way: str, nodes: Any, answer: Any) -> None:
    relays = nodes.relays()
    cluster = nodes.cluster(relays=relays)
    relays[1].loss[way] = 0.1
    nodes.check_same(answer(cluster))
    assert cluster.lost == []


def test_every_link_is_throttled(nodes: Any, answer: Any) -> None:
    """To 1 Mbit/s."""
    relays = nodes.relays()
    cluster = nodes.cluster(relays=relays)
    for relay in relays:
        relay.bytes_per_s = 125e3
    nodes.check_same(answer(cluster))
    assert cluster.lost == []


@pytest.mark.parametrize("away_s", [0.5, 1.3, 1.6, 4.0])
def test_every_link_is_away_for_a_while(away_s: float, nodes: Any, answer: Any) -> None:
    """A switch that starts again: the answer waits and goes on."""
    relays = nodes.relays()
    cluster = nodes.cluster(relays=relays)

    def act() -> None:
        for relay in relays:
            relay.cut()
            threading.Timer(away_s, relay.mend).start()

    began = time.monotonic()
    nodes.check_same(answer(cluster, {5: act}))
    assert away_s < time.monotonic() - began < away_s + 10.0
