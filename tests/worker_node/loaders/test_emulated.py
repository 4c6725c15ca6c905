"""A worker whose times are a profile's: the bytes move and the answers are right. A load's end is not told before its
time; a computation is done at once, and its answer says when it counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from checkpoint.store import ExpertStore
from odmoe.clusters.timed_streams import TimedNode
from scheduler.emulation.clock import Emulation
from scheduler.errors import ConfigError, ODMoEError
from scheduler.timing.profile import find_profile
from support.nodes.stepping_clock import SteppingClock
from support.nodes.worker_desk import WAIT_S, Expected, WorkerDesk
from wire import inprocess
from wire.messages import Computed, Evict, Load, Loaded, Message, Stamped, WorkerReady
from worker_node.loaders.emulated import EmulatedLoader
from worker_node.loaders.make import make_loader
from worker_node.loaders.memory import MemoryLoader

BlobOf = Callable[[int, int], bytes]
PROFILE = find_profile("rtx3090-1gbe")
HOUR = 3600.0


def emulated(store: ExpertStore, **changes: float) -> EmulatedLoader:
    return EmulatedLoader(MemoryLoader(store), Emulation(replace(PROFILE, **changes)))


def worker_with_endless_loads(desk: WorkerDesk, store: ExpertStore, slots: int) -> Any:
    """From when it serves: it was measured before."""
    emulation = Emulation(PROFILE)
    worker = desk.worker(slots=slots, loader=EmulatedLoader(MemoryLoader(store), emulation))
    emulation.profile = replace(PROFILE, load_s=HOUR)
    return worker


class Stamps:
    """A main node to which a worker's messages come as they are sent: when they are due, and when they came."""

    def __init__(self, desk: WorkerDesk, worker: Any, emulation: Emulation) -> None:
        self.got: SimpleQueue[tuple[Message, float, float]] = SimpleQueue()
        self.channel = inprocess.connect(TimedNode(worker, emulation), self)
        self.channel.send(desk.hello())
        assert isinstance(self.next()[0], WorkerReady)

    def on_message(self, message: Message) -> None:
        assert isinstance(message, Stamped)
        self.got.put((message.message, message.due, time.monotonic()))

    def on_close(self, error: ODMoEError | None) -> None:
        pass

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.channel.send(message)

    def next(self) -> tuple[Message, float, float]:
        return self.got.get(timeout=WAIT_S)


def test_loads_are_real_and_last_as_the_profile_says(
    desk: WorkerDesk, store: ExpertStore, blob: BlobOf, stepping_clock: SteppingClock
) -> None:
    emulation = Emulation(replace(PROFILE, load_s=0.04), stepping_clock)
    worker = desk.worker(slots=2, loader=EmulatedLoader(MemoryLoader(store), emulation))
    main = desk.welcome(worker)
    start = stepping_clock.at
    main.send(Load(1, 0, 1, 2), Load(2, 1, 0, 3))
    for number, expert in enumerate([(1, 2), (0, 3)], 1):
        loaded = main.next()
        assert isinstance(loaded, Loaded)
        assert (loaded.load_id, loaded.nbytes) == (number, len(blob(*expert)))
        assert loaded.seconds == pytest.approx(0.04)
        assert bytes(worker.slots.buffers[number - 1].numpy()) == blob(*expert)
    assert stepping_clock.at - start == pytest.approx(0.08), "one link, one load at a time"


def test_computations_are_right_and_last_as_the_profile_says(
    desk: WorkerDesk, store: ExpertStore, expected: Expected
) -> None:
    """By a clock that stands still: one computation at a time, each answer due when its computation ends."""
    profile = replace(PROFILE, load_s=0.0, expert_s=0.03, expert_extra_s=0.01)
    emulation = Emulation(profile, lambda: 100.0)
    main = Stamps(desk, desk.worker(loader=EmulatedLoader(MemoryLoader(store), emulation)), emulation)
    main.send(Load(1, 0, 1, 3))
    assert isinstance(main.next()[0], Loaded)
    should = 100.0
    calls = [desk.compute(call, 0, 1, 3, rows, evict=False) for call, rows in ((1, 1), (2, 4), (3, 1))]
    main.send(*calls)
    for call in calls:
        answer, due, _ = main.next()
        assert expected.fits(answer, call)
        lasts = 0.03 + (call.hidden.shape[0] - 1) * 0.01
        should += lasts
        assert isinstance(answer, Computed)
        assert answer.seconds == pytest.approx(lasts)
        assert due == pytest.approx(should)
    emulation.close()


def test_a_computation_sent_ahead_starts_where_its_load_ends(
    desk: WorkerDesk, store: ExpertStore, expected: Expected
) -> None:
    """By the real clock: the load's end comes when it is due, the answer is due so much later."""
    emulation = Emulation(replace(PROFILE, load_s=0.03, expert_s=0.02))
    main = Stamps(desk, desk.worker(loader=EmulatedLoader(MemoryLoader(store), emulation)), emulation)
    asked, start = desk.compute(2, 0, 0, 0, rows=1), time.monotonic()
    main.send(Load(1, 0, 0, 0), asked)
    loaded, ended, came = main.next()
    assert isinstance(loaded, Loaded)
    assert came >= ended >= start + 0.03
    answer, due, _ = main.next()
    assert expected.fits(answer, asked)
    assert due >= ended + 0.02 - 1e-6
    emulation.close()


def test_a_load_that_is_given_up_ends_at_once(desk: WorkerDesk, store: ExpertStore) -> None:
    """Its slot and its link are free for the next, although it would have lasted an hour."""
    main = desk.welcome(worker_with_endless_loads(desk, store, slots=1))
    for number in range(1, 4):
        main.send(Load(number, 0, 0, number), desk.compute(10 + number, 0, 0, number), Evict(0))
        assert main.usage().loads == 0, "the loading thread answers this after the load"
    main.send(Load(9, 0, 1, 1))
    assert main.nothing_came()


def test_closing_does_not_wait_for_a_load(desk: WorkerDesk, store: ExpertStore) -> None:
    worker = worker_with_endless_loads(desk, store, slots=2)
    main = desk.welcome(worker)
    main.send(Load(1, 0, 0, 0), Load(2, 1, 0, 1))
    worker.close()
    assert main.nothing_came()


def test_a_worker_says_that_it_is_emulated(desk: WorkerDesk, store: ExpertStore) -> None:
    main = desk.connect(desk.worker(loader=make_loader("emulated", store, Emulation(PROFILE))))
    main.send(desk.hello())
    ready = main.next()
    assert isinstance(ready, WorkerReady)
    assert (ready.loader, ready.device) == ("emulated", "cpu")


def test_a_computation_that_fails_does_not_stop_the_worker(
    desk: WorkerDesk, store: ExpertStore, expected: Expected
) -> None:
    main = desk.welcome(desk.worker(loader=emulated(store, load_s=0.001, expert_s=0.001)))
    main.send(Load(1, 0, 0, 0))
    main.next()
    right = desk.compute(3, 0, 0, 0, evict=False)
    main.send(replace(right, call_id=2, weights=right.hidden), right)
    answers = main.hear(2)
    assert ("Failed", 2) in answers
    assert isinstance(answers["Computed", 3], Computed)
    assert expected.fits(answers["Computed", 3], right)


def test_without_a_profile(store: ExpertStore) -> None:
    with pytest.raises(ConfigError, match="profile"):
        make_loader("emulated", store)
    with pytest.raises(ConfigError, match="allowed: disk, memory, cuda"):
        make_loader("emulated", store, Emulation(PROFILE), "emulated")
