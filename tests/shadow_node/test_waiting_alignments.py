"""Alignments that wait at the shadow are bounded in bytes, and those that no pass will read are refused."""

from __future__ import annotations

import pytest

import shadow_node.node
from support.shadows.arithmetic_shadow import Bench
from wire.messages import Align, CloseRequest, Failed, OpenRequest, Tensor

MOST = 10_000
LATER = 5
"""A pass that does not begin in these tests."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(shadow_node.node, "ALIGNMENT_BYTES", MOST)
    return Bench()


def part(request: int, step: int, nbytes: int) -> Align:
    return Align(request, step, 1, 0, (Tensor("uint8", (nbytes,), bytes(nbytes)),), more=True)


def failures(bench: Bench) -> list[str]:
    return [message.message for message in bench.got if isinstance(message, Failed)]


def test_a_flood_ends_the_stream(bench: Bench) -> None:
    for request in (1, 2):
        bench.take(OpenRequest(request, (0, 1), 0, 20, 1, 1, 2, False))
    for request in (1, 2, 1):
        bench.take(part(request, LATER, 2000))
    bench.work()
    assert failures(bench) == []
    assert not bench.session.over
    bench.take(part(2, LATER, 2000))
    assert "9072 bytes of alignments wait already, 10000 may" in failures(bench)[0]
    assert bench.session.over


def test_what_is_closed_makes_room(bench: Bench) -> None:
    for request in range(1, 20):
        bench.take(OpenRequest(request, (0, 1), 0, 20, 1, 1, 2, False))
        bench.take(part(request, LATER, 4000))
        bench.work()
        bench.take(CloseRequest(request))
    assert failures(bench) == []


def test_an_alignment_of_no_pass_is_refused(bench: Bench) -> None:
    bench.take(OpenRequest(1, (0, 1), 0, 20, 1, 1, 2, False))
    bench.take(part(1, 21, 10))
    assert failures(bench) == [
        "shadow: request 1 has 20 decode passes at most; an alignment came for pass 21",
    ]


def test_followed_requests_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_node.node, "MAX_REQUESTS", 3)
    for request in (1, 2, 3, 3, 4):
        bench.take(OpenRequest(request, (0, 1), 0, 20, 1, 1, 2, False))
    assert failures(bench) == ["shadow: shadow follows 3 requests already; close some"]
