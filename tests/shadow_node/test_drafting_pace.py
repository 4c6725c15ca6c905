"""The emulated time of a shadow that drafts: each message counts at the end of the layer after which it is sent."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.shadows.arithmetic_shadow import LAYERS, Bench, Followed
from wire.messages import Draft, Message, Prediction, ShadowProgress

departures = pytest.mark.parametrize("late", [False, True])


class Seconds:
    """A pace of a second a layer."""

    is_emulated, main_layer_s = True, 5.0

    def __init__(self) -> None:
        self.time = 0.0
        self.undisturbed: list[float] = []
        """Of each layer."""

    def now(self) -> float:
        return self.time

    def take(self, at: float) -> None:
        self.time = max(self.time, at)

    def layer(self, rows: int, undisturbed_until: float) -> None:
        self.undisturbed.append(undisturbed_until)
        self.time += 1


class Timed(Bench):
    """Keeps when each message was sent."""

    def __init__(self) -> None:
        self.seconds, self.sent = Seconds(), list[tuple[float, Message]]()
        super().__init__(pace=self.seconds)

    def send(self, *messages: Message) -> None:
        super().send(*messages)
        self.sent += [(self.seconds.time, message) for message in messages]

    def at(self, time: float, message: Any) -> None:
        self.seconds.time = time
        self.take(message)
        self.work()

    def told(self) -> list[tuple[float, str, int]]:
        """(when, what, pass) since the last time."""
        found: list[tuple[float, str, int]] = []
        for time, message in self.sent:
            if isinstance(message, Prediction):
                found.append((time, f"layer {message.layer}", message.position - 2))
            elif isinstance(message, Draft):
                found.append((time, "draft", message.step))
            elif isinstance(message, ShadowProgress):
                found.append((time, "idle" if message.idle else "same", message.step))
        self.sent.clear()
        return found


def a_pass(start: float, step: int) -> list[tuple[float, str, int]]:
    layers = [(start + layer + 1, f"layer {layer}", step) for layer in range(LAYERS)]
    return [*layers, (start + LAYERS, "draft", step + 1)]


@departures
def test_each_draft_counts_at_the_end_of_its_pass(late: bool) -> None:
    bench = Timed()
    main = Followed(1, [0, 1], [0] * 9, [0] * 20, token=1, kv=0, late=late)
    bench.at(0, main.message)
    assert bench.told() == []
    bench.at(10, main.align(drafts=2))
    assert bench.told() == [*a_pass(10, 0), *a_pass(13, 1), *a_pass(16, 2), (19, "idle", 0)]
    own = {m.step: m.token for m in bench.got if isinstance(m, Draft)}
    main.tokens[1:3] = own[1], own[2]
    bench.at(30, main.align(2, drafts=2))  # a block of two, right
    assert bench.told() == [*a_pass(30, 3), *a_pass(33, 4), (36, "idle", 2)]
    main.tokens[3] = (own[3] + 1) % 3
    bench.at(40, main.align(drafts=1))
    assert bench.told() == [*a_pass(40, 3), *a_pass(43, 4), (46, "idle", 3)]
    assert bench.failures() == []


@departures
def test_a_shadow_that_drafts_waits_for_layers_that_a_message_may_change(late: bool) -> None:
    """Even at a late departure: an alignment may say that a draft was wrong. None comes before the main model has done
    all its layers."""
    bench = Timed()
    main = Followed(1, [0, 1], [0] * 9, [0] * 20, token=1, kv=0, late=late)
    bench.at(0, main.message)
    bench.at(10, main.align())
    before = len(bench.seconds.undisturbed)
    assert set(bench.seconds.undisturbed) == ({math.inf} if late else {-math.inf, 25.0})
    bench.at(30, main.align(drafts=2))
    assert set(bench.seconds.undisturbed[before:]) == {45.0}
