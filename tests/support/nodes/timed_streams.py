"""For tests of streams whose messages travel: an end that keeps what arrives, and a clock that stands still."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

from odmoe.clusters.timed_streams import MainStreamEnd, StreamEnd, TimedHandler
from scheduler.emulation.clock import Emulation
from scheduler.emulation.expected_predictions import ExpectedPredictions
from scheduler.errors import ODMoEError
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import find_profile
from wire.base import Channel
from wire.messages import Load, Loaded, Message, Stamped, Tensor
from wire.tracing import machine

WAIT_S = 60.0
"""No test takes this long: whoever waits longer hangs."""
PROFILE = find_profile("rtx3090-1gbe")
HERE = machine()


def load(number: int) -> Load:
    return Load(number, 0, 0, 0)


def rows(count: int) -> Tensor:
    return Tensor("uint8", (count, 2), bytes(2 * count))


def main_end() -> MainStreamEnd:
    return MainStreamEnd(MainLinks(PROFILE), ExpectedPredictions(PROFILE))


class End:
    """Either end of a stream: keeps what arrives, the emulated time of that, and when it was."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.got: SimpleQueue[tuple[Message, float, float]] = SimpleQueue()
        self.reply: Channel | None = None
        self.ends: list[ODMoEError | None] = []
        self.closed = threading.Event()

    def on_message(self, message: Message) -> None:
        assert not self.closed.is_set(), "a message after on_close"
        self.got.put((message, self.emulation.now(), time.monotonic()))

    def on_close(self, error: ODMoEError | None) -> None:
        self.ends.append(error)
        self.closed.set()

    def accept(self, reply: Channel) -> End:
        self.reply = reply
        return self

    def close(self) -> None:
        pass

    def heard(self) -> list[tuple[Message, float]]:
        found = []
        while not self.got.empty():
            message, at, _ = self.got.get()
            found.append((message, at))
        return found

    def take(self, count: int) -> list[Message]:
        return [self.got.get(timeout=WAIT_S)[0] for _ in range(count)]


class World:
    """A clock, and all that is told while it runs, in order."""

    def __init__(self) -> None:
        self.time = 100.0
        self.emulation = Emulation(PROFILE, lambda: self.time)
        self.told: list[tuple[str, int, float]] = []

    def stream(self, name: str, way: StreamEnd | None = None) -> TimedHandler:
        """Keeps (the stream, the message's number, the emulated time at which it counts)."""
        world = self

        class Telling:
            def on_message(self, message: Any) -> None:
                number = message.load_id if isinstance(message, Load | Loaded) else message.call_id
                world.told.append((name, number, world.emulation.now()))

            def on_close(self, error: ODMoEError | None) -> None:
                world.told.append((name, -1, world.emulation.now()))

        return TimedHandler(Telling(), way or StreamEnd(), self.emulation)

    def until(self, moment: float) -> None:
        self.time = moment
        self.emulation.agenda.wait(-1e9, lambda: None)
        self.emulation.agenda.wait(moment, lambda: None)


def stamped(due: float, number: int, where: str = HERE, sent: float = 0.0) -> Stamped:
    return Stamped(due, sent, where, load(number))
