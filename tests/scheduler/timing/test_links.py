"""The shared link's arithmetic against a link that passes its messages millisecond by millisecond."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.timing.links import Lane, MainLinks
from scheduler.timing.profile import find_profile

PROFILE = find_profile("rtx3090-1gbe")
MILLISECONDS = replace(PROFILE, hidden_bytes=125, kv_bytes=250, link_bits_per_s=1e6, hop_s=0.005)
"""A row takes a millisecond, a row of keys and values two, and nothing arrives within five."""

Sent = tuple[str, int, int]
sendings = st.lists(st.tuples(st.sampled_from(["out", "in", "kv"]), st.integers(0, 8), st.integers(0, 7)), max_size=25)
"""(which way, so many milliseconds after the one before, rows)"""


def passed(sent: list[tuple[int, int]]) -> list[int]:
    """When each message's last row has passed: (sent at, milliseconds that it takes), one link, step by step."""
    ends, waiting, now = [0] * len(sent), deque(range(len(sent))), 0
    while waiting:
        first = waiting[0]
        at, left = sent[first]
        while now < at:
            now += 1
        for _ in range(left):
            now += 1
        ends[first] = now
        waiting.popleft()
    return ends


@pytest.mark.parametrize("duplex", [True, False])
@given(messages=sendings)
def test_first_come_first_served_and_never_within_a_hop(duplex: bool, messages: list[Sent]) -> None:
    links, now, got = MainLinks(MILLISECONDS, duplex), 0, []
    lanes: dict[str, list[tuple[int, int]]] = {"out": [], "in": [], "kv": []}
    where = []
    for way, gap, rows in messages:
        now += gap
        lane = "out" if way == "in" and not duplex else way
        where.append((lane, len(lanes[lane]), now))
        lanes[lane].append((now, 2 * rows if way == "kv" else rows))
        send = {"out": links.send_rows, "in": links.send_outputs, "kv": links.send_alignment}[way]
        got.append(send(now / 1e3, rows))
        assert links.send_prediction(now / 1e3) == pytest.approx((now + 5) / 1e3)
    ends = {lane: passed(sent) for lane, sent in lanes.items()}
    should = [max(at + 5, ends[lane][place]) / 1e3 for lane, place, at in where]
    assert got == pytest.approx(should, abs=1e-9)


@given(work=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=25))
def test_a_lane_does_one_thing_at_a_time(work: list[tuple[int, int]]) -> None:
    """Also where it is told of something that was there before what it has done already."""
    lane, now, sent = Lane(), 0, []
    for gap, lasts in work:
        now += gap
        sent.append((now, lasts))
    assert [lane.take(at, lasts) for at, lasts in sent] == passed(sent)
    if sent:
        end = lane.free
        assert lane.take(-5.0, 2.0) == end + 2.0


def test_the_papers_link() -> None:
    """16,384 bytes an embedding, 8,192 a layer's keys and values, 1 Gbit/s, and 0.45 ms a hop."""
    links = MainLinks(PROFILE)
    assert links.send_rows(10.0, 1) == pytest.approx(10.00045), "131 us on the link, and the hop is longer"
    assert links.send_rows(20.0, 128) == pytest.approx(20.016777216)
    assert links.send_rows(20.0, 128) == pytest.approx(20.033554432)
    assert links.send_outputs(20.0, 64) == pytest.approx(20.008388608), "the other direction is free"
    assert links.send_alignment(20.0, 32 * 16) == pytest.approx(20.033554432), "a lane of its own"
    assert links.send_alignment(20.0, 0) == pytest.approx(20.033554432), "but for one after the other"
    assert links.send_prediction(20.0) == pytest.approx(20.00045)


def test_states_travel_with_some_alignments() -> None:
    """2,000 bytes at 1 Mbit/s are 16 ms, beside 2 ms a row."""
    links = MainLinks(replace(MILLISECONDS, state_bytes=2000))
    assert links.send_alignment(0.0, 3, states=True) == pytest.approx(0.016 + 3 * 0.002)
    assert links.send_alignment(0.5, 3) == pytest.approx(0.5 + 3 * 0.002)
    assert links.send_alignment(1.0, 0) == pytest.approx(1.005), "a token alone"
