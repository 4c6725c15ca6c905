"""Alignments at any moment of any pass: what stands at the end is what a waiting shadow predicts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shadows.arithmetic_shadow import LAYERS, VOCABULARY, Bench, Followed
from wire.messages import CloseRequest, Prediction

PASSES = 6
periods = st.sampled_from([1, 0, 2, 3])


@st.composite
def answers(draw: st.DrawFn, number: int) -> dict[str, Any]:
    chance = Random(draw(st.integers(0, 10**6)))
    prompt = [chance.randrange(VOCABULARY) for _ in range(draw(st.integers(1, 4)))]
    return {
        "number": number,
        "prompt": prompt,
        "tokens": [chance.randrange(VOCABULARY) for _ in range(PASSES)],
        "rows": [chance.randrange(50) for _ in range(len(prompt) + PASSES)],
        "token": draw(periods),
        "kv": draw(periods),
        "lookahead": draw(st.integers(0, 3)),
    }


def late(answer: dict[str, Any]) -> list[list[frozenset[int]]]:
    bench, followed = Bench(), Followed(late=True, **answer)
    bench.take(followed.message)
    for _ in range(PASSES):
        bench.work()
        bench.take(followed.align())
    bench.work()
    assert bench.failures() == []
    return [bench.stands(followed, step) for step in range(PASSES)]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(data=st.data(), count=st.integers(1, 3), seed=st.integers(0, 10**6), often=st.sampled_from([0.1, 0.3, 0.8]))
def test_what_stands_is_what_a_shadow_predicts_that_waits(
    data: st.DataObject, count: int, seed: int, often: float
) -> None:
    """An alignment comes at a layer of any pass but one that repeats another: a repetition would be given up for it."""
    chance = Random(seed)
    drawn = [data.draw(answers(number)) for number in range(1, count + 1)]
    expected = [late(answer) for answer in drawn]
    bench = Bench()
    followed = [Followed(late=False, **answer) for answer in drawn]
    settled: dict[int, bool] = {one.number: True for one in followed}

    def at_layer() -> None:
        """A pass was announced, and the shadow is at work on it, or on one ahead of it."""
        for one in followed:
            course = bench.session._requests[one.number].course
            ahead = course.running and course.step == one.told and not course.again and settled[one.number]
            if 0 < one.told < PASSES and ahead and chance.random() < often:
                settled[one.number] = False
                bench.take(one.align())

    for one in followed:
        bench.take(one.message)
    bench.model.on_layer = at_layer
    bench.work()
    while any(one.told < PASSES for one in followed):
        for one in followed:
            if one.told < PASSES and chance.random() < 0.7:
                bench.take(one.align())
        bench.work()
        settled = dict.fromkeys(settled, True)
    bench.work()
    assert bench.failures() == []
    for one, wanted in zip(followed, expected, strict=True):
        assert [bench.stands(one, step) for step in range(PASSES)] == wanted


@pytest.mark.slow
@settings(max_examples=35, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), closes=st.integers(1, 30))
def test_a_shadow_that_is_overtaken_is_right_again_with_the_next_alignment(
    data: st.DataObject, seed: int, closes: int
) -> None:
    """Alignments of every pass come at any layer, requests close: nothing fails, every pass was predicted, and the last
    one, after whose alignment the shadow has time, as by a shadow that waits."""
    drawn = [data.draw(answers(number)) | {"token": 1, "kv": 1, "lookahead": 2} for number in (1, 2)]
    bench = Bench()
    one, other = (Followed(late=False, **answer) for answer in drawn)
    chance = Random(seed)
    layers = 0

    def at_layer() -> None:
        nonlocal layers
        layers += 1
        if layers == closes:
            bench.take(CloseRequest(other.number))
        for each in (one, other):
            if each.told < PASSES and chance.random() < 0.4:
                bench.take(each.align())

    bench.take(one.message)
    bench.take(other.message)
    bench.model.on_layer = at_layer
    bench.work()
    while one.told < PASSES:
        bench.take(one.align())
        bench.work()
    bench.work()
    assert bench.failures() == []
    assert bench.stands(one, PASSES - 1) == late(drawn[0])[PASSES - 1]
    assert all(len(bench.stands(one, step)) == LAYERS for step in range(PASSES))


@settings(max_examples=35, deadline=None)
@given(answer=answers(1))
def test_a_repetition_says_only_what_differs(answer: dict[str, Any]) -> None:
    """No prediction is sent twice in a row."""
    bench, followed = Bench(), Followed(late=False, **answer)
    bench.take(followed.message)
    for _ in range(PASSES):
        bench.work()
        bench.take(followed.align())
    bench.work()
    last: dict[tuple[int, int], set[int]] = {}
    for message in bench.got:
        if isinstance(message, Prediction):
            key = message.position, message.layer
            assert last.get(key) != set(message.experts)
            last[key] = set(message.experts)
