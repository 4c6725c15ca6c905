"""A host place over the in-process transport: what a main node may ask of it, and what it hears back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from odmoe.clusters.timed_streams import TimedNode
from scheduler.emulation.clock import Emulation
from scheduler.errors import ConfigError, CorruptStoreError, LaunchError, ODMoEError
from scheduler.timing.profile import find_profile
from support.nodes.damage import flip
from support.nodes.held import CountedArithmetic, HeldArithmetic
from support.nodes.worker_desk import NO_THREAD_FAILS, WAIT_S, WRONG_ROWS, Expected, WorkerDesk
from wire import inprocess
from wire.credit import QUEUE_BYTES
from wire.messages import (
    PROTOCOL_VERSION,
    AskTrace,
    CloseRequest,
    Compute,
    Computed,
    Echo,
    Evict,
    Load,
    Message,
    Stamped,
    TraceRecords,
    WorkerReady,
    WorkerUsage,
)
from worker_node import host
from worker_node.host import HostPlace
from worker_node.pace import WorkerPace

pytestmark = NO_THREAD_FAILS
PROFILE = replace(find_profile("rtx3090-1gbe"), name="both", host_s=0.03, host_extra_s=0.01)


@pytest.fixture
def place(desk: WorkerDesk) -> Iterator[HostPlace]:
    made = HostPlace("host", desk.store, desk.arithmetic)
    yield made
    made.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("host-")] == []


# --- the handshake ----------------------------------------------------------------------------------------------------


def test_hello_is_answered_by_what_it_is(desk: WorkerDesk, place: HostPlace) -> None:
    main = desk.connect(place)
    main.send(desk.hello())
    ready = main.next()
    assert ready == WorkerReady(
        version=PROTOCOL_VERSION,
        node="host",
        slots=0,
        slot_bytes=0,
        device="cpu",
        loader="host",
        host=os.uname().nodename,
        pid=os.getpid(),
        device_name=ready.device_name,
        device_bytes=psutil.virtual_memory().total,
        load_bytes_per_s=0.0,
        call_s=ready.call_s,
        row_s=ready.row_s,
        queue_bytes=QUEUE_BYTES,
    )
    assert ready.call_s + ready.row_s > 0, "it was measured"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": PROTOCOL_VERSION + 1}, "VersionError"),
        ({"fingerprint": "0" * 32}, "ModelMismatchError"),
        ({"dtype": "float32"}, "ModelMismatchError"),
    ],
)
def test_two_that_do_not_belong_together(
    desk: WorkerDesk, place: HostPlace, changes: dict[str, Any], error: str
) -> None:
    main = desk.connect(place)
    main.send(desk.hello(**changes), desk.compute(1, 0, 0, 0, evict=False))
    main.failure(error)
    assert "before Hello" in main.failure("ProtocolError", call_id=1).message


def test_an_echo_comes_back_as_it_was(desk: WorkerDesk, place: HostPlace) -> None:
    main = desk.welcome(place)
    main.send(Echo(3))
    assert main.next() == Echo(3)


def test_a_main_node_that_connects_again_takes_over(desk: WorkerDesk, place: HostPlace, expected: Expected) -> None:
    """The end of its stream before is not that of the next one."""
    first, second, third = (desk.welcome(place) for _ in range(3))
    for gone in (first, second):
        assert "a newer stream of the same main node" in gone.failure("LinkError").message
    asked = desk.compute(1, 0, 1, 2, evict=False)
    third.send(asked)
    assert expected.fits(third.next(), asked)


@pytest.mark.slow
def test_another_main_node_displaces_nobody(desk: WorkerDesk, place: HostPlace) -> None:
    for session in ("another main node", ""):
        first, second = desk.welcome(place), desk.connect(place)
        second.send(desk.hello(session=session))
        assert "serves another main node" in second.failure("OtherMainNodeError").message
        first.send(Echo(1))
        assert first.next() == Echo(1)


# --- computations -----------------------------------------------------------------------------------------------------


def test_every_expert_as_transformers_eager(desk: WorkerDesk, place: HostPlace, expected: Expected) -> None:
    """To the last bit, for one row and for many, without any load; twice, since what is bound is kept."""
    main = desk.welcome(place)
    asked = [
        desk.compute(1000 * layer + 100 * expert + rows + again, 0, layer, expert, rows, evict=False)
        for again in (0, 50)
        for layer in range(2)
        for expert in range(4)
        for rows in (1, 2, 17)
    ]
    main.send(*asked)
    for one in asked:  # one thread: in the order in which they were asked
        assert expected.fits(main.next(), one)


def test_no_more_than_so_many_are_kept_bound(
    desk: WorkerDesk, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were used last: whoever is bound anew had gone."""
    monkeypatch.setattr(host, "MODULES", 3)
    counted = CountedArithmetic(desk.arithmetic)
    place = HostPlace("host", desk.store, counted)
    main = desk.welcome(place)
    anew: list[tuple[int, int]] = []
    used = [(0, 0), (0, 1), (0, 2), (0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]
    for number, (layer, expert) in enumerate([(1, 3), (1, 2), (0, 3), *used], 1):
        before = len(counted.bound)
        asked = desk.compute(number, 0, layer, expert, evict=False)
        main.send(asked)
        assert expected.fits(main.next(), asked)
        assert len(counted.alive) <= 3
        anew += [(layer, expert)] * (len(counted.bound) - before)
    assert [one for one in anew if one in used] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 1), (0, 0)]
    place.close()


def test_the_store_is_not_copied(desk: WorkerDesk, own_store: ExpertStore, expected: Expected, blob: Any) -> None:
    """What is bound to an expert lies in the map of its file: another expert's bytes there are another expert."""
    place = HostPlace("host", own_store, desk.arithmetic, checks=False)
    main = desk.welcome(place)
    asked, other = (desk.compute(1, 0, 0, expert, evict=False) for expert in (3, 2))
    main.send(asked)
    assert expected.fits(main.next(), asked)
    file, there = own_store.locate(0, 3)
    with file.open("r+b") as stream:
        stream.seek(there.offset)
        stream.write(blob(0, 2))
    main.send(asked)
    assert expected.fits(main.next(), other)
    place.close()


def test_an_expert_that_was_damaged_is_not_computed(
    desk: WorkerDesk, own_store: ExpertStore, expected: Expected
) -> None:
    place = HostPlace("host", own_store, desk.arithmetic)
    main = desk.welcome(place)
    asked, other = desk.compute(1, 0, 0, 3, evict=False), desk.compute(2, 0, 0, 2, evict=False)
    main.send(asked)
    assert expected.fits(main.next(), asked)
    flip(own_store, 0, 3)
    main.send(asked, other)
    failure = main.failure("CorruptStoreError", call_id=1)
    for part in ("expert 3 of layer 0", str(own_store.locate(0, 3)[0]), os.uname().nodename):
        assert part in failure.message
    assert expected.fits(main.next(), other)
    flip(own_store, 0, 3)  # repaired
    main.send(asked)
    assert expected.fits(main.next(), asked)
    place.close()


def test_an_expert_that_is_damaged_while_it_is_computed_is_not_answered(
    desk: WorkerDesk, own_store: ExpertStore, held_arithmetic: HeldArithmetic
) -> None:
    held_arithmetic.serving = False
    place = HostPlace("host", own_store, held_arithmetic)  # type: ignore[arg-type]
    held_arithmetic.serving = True
    gate, main = held_arithmetic.hold(0), desk.welcome(place)
    main.send(desk.compute(1, 0, 0, 3, evict=False))
    gate.wait_for_arrival()
    flip(own_store, 0, 3)
    gate.open()
    main.failure("CorruptStoreError", call_id=1)
    place.close()


def test_the_store_is_not_written(desk: WorkerDesk, place: HostPlace, blob: Any) -> None:
    before = blob(0, 3)
    main = desk.welcome(place)
    main.send(desk.compute(1, 0, 0, 3, evict=False))
    assert isinstance(main.next(), Computed)
    assert blob(0, 3) == before


def test_it_holds_nothing_on_a_device(desk: WorkerDesk, place: HostPlace) -> None:
    main = desk.welcome(place)
    main.send(desk.compute(1, 0, 0, 3, evict=False), desk.compute(2, 0, 1, 3, evict=False))
    main.hear(2)
    assert main.usage() == WorkerUsage(0, 0, 0, 0)


def test_what_it_does_is_recorded(desk: WorkerDesk, place: HostPlace) -> None:
    main = desk.connect(place)
    main.send(desk.hello(trace=True))
    assert isinstance(main.next(), WorkerReady)
    main.send(desk.compute(7, 0, 1, 3, evict=False))
    main.next()
    main.send(AskTrace())
    told = main.next()
    assert isinstance(told, TraceRecords)
    spans = list(zip(told.whats, told.labels, told.starts, told.ends, strict=True))
    assert [label for what, label, *_ in spans if what == "compute"] == ["1.3"]
    assert {label for _, label, *_ in spans} >= {"1.3 to #7", "from #7"}
    assert all(start <= end <= told.now for *_, start, end in spans)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "expert"), [(0, 4), (0, -1), (2, 0), (-1, 0)])
def test_expert_that_does_not_exist(
    desk: WorkerDesk, place: HostPlace, expected: Expected, layer: int, expert: int
) -> None:
    main = desk.welcome(place)
    right = desk.compute(2, 0, 0, 0, evict=False)
    main.send(desk.compute(1, 0, layer, expert, evict=False), right)
    wrong = f"layer is {layer};" if layer else f"expert is {expert};"
    assert wrong in main.failure("ProtocolError", call_id=1).message
    assert expected.fits(main.next(), right)


def test_it_has_no_slots(desk: WorkerDesk, place: HostPlace, expected: Expected) -> None:
    main = desk.welcome(place)
    right = desk.compute(9, 0, 0, 0, evict=False)
    main.send(Load(1, 0, 0, 0), Evict(0), desk.compute(3, 1, 0, 0, evict=False), desk.compute(4, 0, 0, 0, evict=True))
    main.send(right)
    assert "takes no Load" in main.failure("ProtocolError", load_id=1).message
    assert "takes no Evict" in main.failure("ProtocolError").message
    assert "says slot 1" in main.failure("ProtocolError", call_id=3).message
    assert "says evict" in main.failure("ProtocolError", call_id=4).message
    assert expected.fits(main.next(), right)


def test_message_that_is_not_for_it(desk: WorkerDesk, place: HostPlace) -> None:
    main = desk.welcome(place)
    main.send(CloseRequest(1))
    assert "CloseRequest" in main.failure("ProtocolError").message


@pytest.mark.parametrize("what", ["width", "bytes", "rows", "unknown dtype"])
def test_rows_that_do_not_fit_the_expert(desk: WorkerDesk, place: HostPlace, expected: Expected, what: str) -> None:
    main = desk.welcome(place)
    right = desk.compute(2, 0, 0, 0, evict=False)
    main.send(Compute(9, 0, 0, 0, WRONG_ROWS[what], right.weights, False), right)
    answers = main.hear(2)
    assert "host: " in answers["Failed", 9].message
    assert expected.fits(answers["Computed", 2], right)


# --- a store that is damaged ------------------------------------------------------------------------------------------


def cut(store: ExpertStore, layer: int, expert: int) -> None:
    """The layer's file ends in the middle of that expert."""
    path, blob = store.locate(layer, expert)
    os.truncate(path, blob.offset + blob.length // 2)


def test_a_store_that_is_cut_off_while_it_serves(own_store: ExpertStore, desk: WorkerDesk, expected: Expected) -> None:
    """A read behind the end of a mapped file would kill the process; it was bound before."""
    place = HostPlace("host", own_store, desk.arithmetic)
    main = desk.welcome(place)
    before = desk.compute(1, 0, 1, 3, evict=False)
    main.send(before)
    assert expected.fits(main.next(), before)
    cut(own_store, 1, 3)
    left = desk.compute(3, 0, 1, 2, evict=False)
    main.send(replace(before, call_id=2), left)
    assert "make the store again" in main.failure("CorruptStoreError", call_id=2).message
    assert expected.fits(main.next(), left)
    place.close()


def test_a_store_that_cannot_be_read(own_store: ExpertStore, arithmetic: ExpertArithmetic) -> None:
    path, _ = own_store.locate(0, 0)
    cut(own_store, 0, 1)
    with pytest.raises(CorruptStoreError, match="make the store again"):
        HostPlace("host", own_store, arithmetic)
    path.unlink()
    with pytest.raises(LaunchError, match="host cannot read"):
        HostPlace("host", own_store, arithmetic)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_what_was_asked_on_a_stream_that_is_over_is_not_computed(
    desk: WorkerDesk, held_arithmetic: HeldArithmetic
) -> None:
    place = HostPlace("host", desk.store, held_arithmetic, WorkerPace(Emulation(PROFILE), host=True))
    gate = held_arithmetic.hold(0)
    main = desk.welcome(place)
    main.send(*(desk.compute(call, 0, 0, 0, evict=False) for call in range(1, 9)))
    gate.wait_for_arrival()
    closing = threading.Thread(target=place.close)
    closing.start()
    gate.open()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert main.nothing_came()


# --- a profile's times ------------------------------------------------------------------------------------------------


def test_by_a_profile_it_is_not_measured(desk: WorkerDesk) -> None:
    place = HostPlace("host", desk.store, desk.arithmetic, WorkerPace(Emulation(PROFILE), host=True))
    main = desk.connect(place)
    main.send(desk.hello())
    ready = main.next()
    assert (ready.call_s, ready.row_s) == (pytest.approx(0.02), 0.01)
    place.close()


def test_a_profile_without_a_host(store: ExpertStore) -> None:
    with pytest.raises(ConfigError, match="rtx3090-1gbe has no times for experts computed in host memory"):
        WorkerPace(Emulation(find_profile("rtx3090-1gbe")), host=True)


class Stamps:
    """A main node to which messages come as they are sent: when they are due."""

    def __init__(self, desk: WorkerDesk, place: HostPlace, emulation: Emulation) -> None:
        self.got: SimpleQueue[Stamped] = SimpleQueue()
        self.channel = inprocess.connect(TimedNode(place, emulation), self)
        self.channel.send(desk.hello())
        assert isinstance(self.next()[0], WorkerReady)

    def on_message(self, message: Message) -> None:
        assert isinstance(message, Stamped)
        self.got.put(message)

    def on_close(self, error: ODMoEError | None) -> None:
        pass

    def next(self) -> tuple[Message, float]:
        stamped = self.got.get(timeout=WAIT_S)
        return stamped.message, stamped.due


def test_a_device_and_a_host_compute_beside_each_other(
    desk: WorkerDesk, store: ExpertStore, expected: Expected
) -> None:
    """By a clock that stands still: one processor each, and each with its own times; both answers are right."""
    from worker_node.loaders.emulated import EmulatedLoader
    from worker_node.loaders.memory import MemoryLoader

    emulation = Emulation(replace(PROFILE, load_s=0.0, expert_s=0.007, expert_extra_s=0.001), lambda: 100.0)
    place = HostPlace("host", store, desk.arithmetic, WorkerPace(emulation, host=True))
    device = desk.worker(loader=EmulatedLoader(MemoryLoader(store), emulation))
    mains = Stamps(desk, place, emulation), Stamps(desk, device, emulation)
    mains[1].channel.send(Load(1, 0, 1, 3))
    mains[1].next()
    due = [100.0, 100.0]
    for call, rows in enumerate((1, 4, 2), 2):
        for of, (one, row) in enumerate(((0.03, 0.01), (0.007, 0.001))):
            asked = desk.compute(call, 0, 1, 3, rows, evict=False)
            mains[of].channel.send(asked)
            answer, at = mains[of].next()
            due[of] += one + (rows - 1) * row
            assert expected.fits(answer, asked)
            assert isinstance(answer, Computed)
            assert (answer.seconds, at) == (pytest.approx(one + (rows - 1) * row), pytest.approx(due[of]))
    emulation.close()
    place.close()
