"""A worker over the in-process transport: what a main node may ask of it, and what it hears back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
import xxhash

from checkpoint.held import HELD, held_text
from checkpoint.store import ExpertStore
from scheduler.types import ExpertId
from support.nodes.held import CountedArithmetic, HeldLoader
from support.nodes.worker_desk import NO_THREAD_FAILS, WRONG_ROWS, Expected, WorkerDesk
from wire.checksums import tensor_checksum
from wire.credit import QUEUE_BYTES
from wire.messages import (
    PROTOCOL_VERSION,
    AskUsage,
    CloseRequest,
    Compute,
    Computed,
    Echo,
    Evict,
    Held,
    Load,
    Loaded,
    Stamped,
    WorkerReady,
    WorkerUsage,
)
from worker_node import part_watch, session, slot_computer
from worker_node.loaders.host_tier import HostTier
from worker_node.loaders.tiered import TieredLoader

pytestmark = NO_THREAD_FAILS
BlobOf = Callable[[int, int], bytes]


# --- the handshake ----------------------------------------------------------------------------------------------------


def test_hello_is_answered_by_what_the_worker_is(desk: WorkerDesk) -> None:
    main = desk.connect(desk.worker(slots=3))
    main.send(desk.hello())
    ready = main.next()
    assert ready.load_bytes_per_s > 0
    assert ready.call_s >= 0
    assert ready.row_s >= 0
    assert ready == WorkerReady(
        version=PROTOCOL_VERSION,
        node="w0",
        slots=3,
        slot_bytes=desk.store.manifest.blob_bytes,
        device="cpu",
        loader="memory",
        host=os.uname().nodename,
        pid=os.getpid(),
        device_name=ready.device_name,
        device_bytes=psutil.virtual_memory().total,
        load_bytes_per_s=ready.load_bytes_per_s,
        call_s=ready.call_s,
        row_s=ready.row_s,
        queue_bytes=QUEUE_BYTES,
    )


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("version", PROTOCOL_VERSION + 1, "protocol version"),
        ("version", PROTOCOL_VERSION - 1, "protocol version"),
        ("fingerprint", "0" * 32, "model fingerprint"),
        ("fingerprint", "", "model fingerprint"),
        ("dtype", "float32", "dtype"),
    ],
)
def test_two_that_do_not_belong_together(desk: WorkerDesk, field: str, value: object, what: str) -> None:
    main = desk.connect(desk.worker())
    main.send(desk.hello(**{field: value}))
    answer = main.failure("VersionError" if field == "version" else "ModelMismatchError")
    assert what in answer.message
    assert "w0" in answer.message
    assert "main" in answer.message
    main.send(Load(1, 0, 0, 0))
    main.failure("ProtocolError", load_id=1)
    main.send(desk.hello())
    assert isinstance(main.next(), WorkerReady)


def test_an_echo_comes_back_at_once_and_as_it_was(desk: WorkerDesk) -> None:
    main = desk.connect(desk.worker())
    main.send(Echo(1))
    assert "Echo came before Hello" in main.failure("ProtocolError").message
    main.send(desk.hello(), Echo(2))
    assert isinstance(main.next(), WorkerReady)
    assert main.next() == Echo(2)


def test_a_main_node_that_keeps_a_profiles_times_is_refused_by_a_worker_that_does_not(desk: WorkerDesk) -> None:
    main = desk.connect(desk.worker())
    main.send(Stamped(1.0, 1.0, "a machine", desk.hello()))
    assert "keeps a profile's times, w0 does not" in main.failure("ProtocolError").message
    main.send(desk.hello())
    assert isinstance(main.next(), WorkerReady)


def test_anything_before_hello_is_refused(desk: WorkerDesk) -> None:
    main = desk.connect(desk.worker())
    main.send(Load(7, 0, 0, 0), desk.compute(8, 0, 0, 0), Evict(0), AskUsage())
    for name, load_id, call_id in (("Load", 7, 0), ("Compute", 0, 8), ("Evict", 0, 0), ("AskUsage", 0, 0)):
        answer = main.failure("ProtocolError", load_id, call_id)
        assert f"{name} came before Hello" in answer.message
    assert main.nothing_came()


def test_message_that_is_not_for_a_worker(desk: WorkerDesk) -> None:
    main = desk.welcome(desk.worker())
    main.send(CloseRequest(1))
    assert "CloseRequest" in main.failure("ProtocolError").message


# --- load, compute, evict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("expert", range(4))
def test_load_and_compute_as_transformers_eager(
    desk: WorkerDesk, expected: Expected, blob: BlobOf, layer: int, expert: int
) -> None:
    worker = desk.worker()
    main = desk.welcome(worker)
    main.send(Load(5, 1, layer, expert))
    loaded = main.next()
    assert isinstance(loaded, Loaded)
    assert (loaded.load_id, loaded.nbytes) == (5, len(blob(layer, expert)))
    assert loaded.seconds >= 0
    assert bytes(worker.slots.buffers[1].numpy()) == blob(layer, expert)
    for call, rows in ((1, 1), (2, 2), (3, 17)):
        asked = desk.compute(call, 1, layer, expert, rows, evict=False)
        main.send(asked)
        assert expected.fits(main.next(), asked)
    assert main.usage() == WorkerUsage(1, worker.slots.allocated_bytes, 1, len(blob(layer, expert)), 1)


def test_experts_that_follow_each_other_in_one_slot(desk: WorkerDesk, expected: Expected) -> None:
    """What is bound to the slot once must see what was loaded since."""
    main = desk.welcome(desk.worker(slots=1))
    for number in range(12):
        layer, expert = number % 2, number * 3 % 4
        main.loads_and_computes(number + 1, desk.compute(100 + number, 0, layer, expert), expected)
    assert main.usage().resident_experts_max == 1


def test_evict_frees_the_slot(desk: WorkerDesk, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.send(Load(1, 0, 0, 0))
    main.next()
    main.send(Evict(0), desk.compute(2, 0, 0, 0))
    assert "nothing" in main.failure("ProtocolError", call_id=2).message
    main.loads_and_computes(3, desk.compute(4, 0, 1, 1), expected)
    assert main.usage().resident_experts_max == 1


def test_evicting_what_is_empty_or_does_not_exist_changes_nothing(desk: WorkerDesk) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.send(Evict(0), Evict(0), Evict(5))
    assert main.usage().resident_experts_max == 0


def test_compute_with_evict_frees_the_slot(desk: WorkerDesk, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.loads_and_computes(1, desk.compute(2, 0, 0, 0, evict=True), expected)
    main.send(desk.compute(3, 0, 0, 0))
    main.failure("ProtocolError", call_id=3)
    main.send(Load(4, 0, 0, 1))
    assert isinstance(main.next(), Loaded)


def test_compute_without_evict_keeps_the_slot(desk: WorkerDesk, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.loads_and_computes(1, desk.compute(2, 0, 0, 0, evict=False), expected)
    main.send(Load(3, 0, 0, 1))
    main.failure("ProtocolError", load_id=3)
    main.send(desk.compute(4, 0, 0, 0))
    assert isinstance(main.next(), Computed)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_second_load_into_an_occupied_slot(desk: WorkerDesk, expected: Expected) -> None:
    main = desk.welcome(desk.worker(slots=2))
    main.send(Load(1, 0, 0, 2))
    main.next()
    main.send(Load(2, 0, 0, 3))
    answer = main.failure("ProtocolError", load_id=2)
    assert "slot 0" in answer.message
    assert "expert=2" in answer.message
    asked = desk.compute(3, 0, 0, 2)
    main.send(asked)
    assert expected.fits(main.next(), asked)


def test_second_load_into_a_slot_that_is_loading(desk: WorkerDesk, held_loader: HeldLoader) -> None:
    gate = held_loader.hold(0, 0)
    main = desk.welcome(desk.worker(loader=held_loader))
    main.send(Load(1, 0, 0, 0))
    gate.wait_for_arrival()
    main.send(Load(2, 0, 0, 1))
    main.failure("ProtocolError", load_id=2)
    gate.open()
    assert main.next().load_id == 1


@pytest.mark.parametrize(("layer", "expert"), [(0, 1), (1, 0)])
def test_compute_of_an_expert_that_is_not_in_the_slot(desk: WorkerDesk, layer: int, expert: int) -> None:
    main = desk.welcome(desk.worker())
    main.send(Load(1, 0, 0, 0))
    main.next()
    main.send(desk.compute(2, 0, layer, expert))
    answer = main.failure("ProtocolError", call_id=2)
    assert f"not expert {expert} of layer {layer}" in answer.message
    main.send(desk.compute(3, 1, 0, 0))
    main.failure("ProtocolError", call_id=3)
    main.send(desk.compute(4, 0, 0, 0))
    assert isinstance(main.next(), Computed)


@pytest.mark.parametrize("slot", [-1, 2, 1 << 40])
def test_slot_that_does_not_exist(desk: WorkerDesk, slot: int) -> None:
    main = desk.welcome(desk.worker(slots=2))
    main.send(Load(1, slot, 0, 0))
    said = "slots 0 to 1" if slot == 2 else f"Load.slot is {slot}"
    assert said in main.failure("ProtocolError", load_id=1).message
    main.send(desk.compute(2, slot, 0, 0))
    main.failure("ProtocolError", call_id=2)


@pytest.mark.parametrize(("layer", "expert"), [(0, 4), (0, -1), (2, 0), (-1, 0)])
def test_expert_that_does_not_exist(desk: WorkerDesk, layer: int, expert: int) -> None:
    main = desk.welcome(desk.worker(slots=1))
    main.send(Load(1, 0, layer, expert))
    wrong = f"layer is {layer};" if layer else f"expert is {expert};"
    assert wrong in main.failure("ProtocolError", load_id=1).message
    main.send(Load(2, 0, 0, 0))
    assert isinstance(main.next(), Loaded)


@pytest.mark.parametrize("what", WRONG_ROWS)
def test_rows_that_do_not_fit_the_expert(desk: WorkerDesk, expected: Expected, what: str) -> None:
    """The call fails by its id; the slot keeps its expert until the main node says otherwise."""
    main = desk.welcome(desk.worker(slots=1))
    right = desk.compute(2, 0, 0, 0)
    main.send(Load(1, 0, 0, 0), Compute(9, 0, 0, 0, WRONG_ROWS[what], right.weights, True))
    answers = main.hear(2)
    assert set(answers) == {("Loaded", 1), ("Failed", 9)}
    assert answers["Failed", 9].call_id == 9
    assert "w0" in answers["Failed", 9].message
    main.send(right)
    assert expected.fits(main.next(), right)
    main.send(Load(3, 0, 1, 1))
    assert isinstance(main.next(), Loaded)


def test_few_modules_are_kept_however_many_slots_and_layers_there_are(
    desk: WorkerDesk, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_computer, "MODULES", 3)
    counted = CountedArithmetic(desk.arithmetic)
    main = desk.welcome(desk.worker(slots=4, arithmetic=counted))
    for number in range(1, 17):
        asked = desk.compute(100 + number, number % 4, number % 2, number * 3 % 4)
        main.loads_and_computes(number, asked, expected)
        assert len(counted.alive) <= 3


# --- checksums --------------------------------------------------------------------------------------------------------


def test_rows_that_were_damaged_are_not_computed(desk: WorkerDesk, expected: Expected) -> None:
    main = desk.welcome(desk.worker())
    main.send(Load(1, 0, 1, 3))
    assert isinstance(main.next(), Loaded)
    asked = desk.compute(2, 0, 1, 3, evict=False)
    whole = replace(asked, checksum=tensor_checksum(asked.hidden, asked.weights))
    for part in ("hidden", "weights"):
        tensor = getattr(whole, part)
        data = bytearray(tensor.data)
        data[1] ^= 64
        main.send(replace(whole, **{part: replace(tensor, data=bytes(data))}))
        failure = main.failure("ProtocolError", call_id=2)
        for named in ("call 2", "expert 3 of layer 1", "checksum", os.uname().nodename):
            assert named in failure.message
    main.send(whole)
    assert expected.fits(main.next(), whole)
    main.send(asked)
    assert expected.fits(main.next(), asked), "without a checksum nothing is compared"


def test_an_output_carries_its_checksum(desk: WorkerDesk) -> None:
    main = desk.welcome(desk.worker())
    main.send(Load(1, 0, 1, 3), desk.compute(2, 0, 1, 3))
    answer = main.hear(2)["Computed", 2]
    assert answer.checksum == xxhash.xxh3_64_intdigest(bytes(answer.output.data))


# --- a part of the store ----------------------------------------------------------------------------------------------


def test_a_worker_says_what_it_holds_and_refuses_the_rest_by_name(desk: WorkerDesk, blob: BlobOf) -> None:
    held = frozenset({ExpertId(0, 1), ExpertId(0, 2), ExpertId(1, 3)})
    desk.store = ExpertStore(desk.store.path, desk.store.manifest, held)
    main = desk.connect(desk.worker())
    main.send(desk.hello())
    ready = main.next()
    assert (ready.in_parts, ready.held) == (True, (0, 1, 2, 1, 3, 3))
    main.send(Load(5, 0, 0, 0))
    assert "does not hold expert 0 of layer 0; it holds 3 experts" in main.failure("NotHeldError", load_id=5).message
    main.send(Load(6, 0, 1, 3))
    assert main.next() == Loaded(6, len(blob(1, 3)), ANY, True)


def test_experts_that_come_while_it_serves_are_reported(
    desk: WorkerDesk, blob: BlobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = watched_part(desk, tmp_path, monkeypatch, [ExpertId(0, 1)])
    main = desk.welcome(desk.worker())
    change_list(folder, held_text(MORE))
    assert main.next() == Held(True, (0, 1, 2, 1, 3, 3))
    main.send(Load(6, 0, 1, 3))
    assert main.next() == Loaded(6, len(blob(1, 3)), ANY, True)


MORE = [ExpertId(0, 1), ExpertId(0, 2), ExpertId(1, 3)]


def watched_part(desk: WorkerDesk, folder: Path, patch: pytest.MonkeyPatch, experts: list[ExpertId]) -> Path:
    """From now on the desk's store is a part with these experts, looked at often."""
    patch.setattr(part_watch, "LOOK_S", 0.05)
    part = Path(shutil.copytree(desk.store.path, folder / "part"))
    (part / HELD).write_text(held_text(experts))
    desk.store = ExpertStore.open(part)
    return part


def change_list(folder: Path, text: str) -> None:
    (folder / "next").write_text(text)
    (folder / "next").replace(folder / HELD)


def has_been_looked_at(caplog: pytest.LogCaptureFixture, said: str) -> int:
    """How often it was said, a few looks after it was said first."""
    for _ in range(200):
        if said in caplog.text:
            break
        time.sleep(0.05)
    time.sleep(0.3)
    return caplog.text.count(said)


def test_a_part_without_experts_is_served_and_gets_some_through_a_device_s_host_tier(
    desk: WorkerDesk, blob: BlobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the processor under another name."""
    monkeypatch.setattr(session, "device_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(session, "device_name", lambda device: device)
    folder = watched_part(desk, tmp_path, monkeypatch, [])
    loader = TieredLoader(desk.store, HostTier(desk.store, 2))
    loader.device = "cpu:0"
    worker = desk.worker(loader=loader)
    assert (worker.load_bytes_per_s, worker.host_load_s) == (0, 0)
    main = desk.welcome(worker)
    change_list(folder, held_text(MORE))
    assert main.next() == Held(True, (0, 1, 2, 1, 3, 3))
    main.send(Load(6, 0, 1, 3, host_slot=0))
    assert main.next() == Loaded(6, len(blob(1, 3)), ANY, True)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / HELD).unlink(), "held.json is gone"),
        (lambda folder: change_list(folder, "{"), "held.json is damaged"),
        (lambda folder: change_list(folder, held_text(MORE[1:])), "held.json is without 1 experts that were there"),
    ],
)
def test_a_list_that_is_lost_or_damaged_for_a_while_changes_nothing(
    desk: WorkerDesk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    said: str,
) -> None:
    folder = watched_part(desk, tmp_path, monkeypatch, [ExpertId(0, 1)])
    main = desk.welcome(desk.worker())
    harm(folder)
    assert has_been_looked_at(caplog, said) == 1
    assert desk.store.held == {ExpertId(0, 1)}
    assert main.nothing_came()
    change_list(folder, held_text(MORE))
    assert main.next() == Held(True, (0, 1, 2, 1, 3, 3))


@pytest.mark.parametrize("file", ["manifest.json", "layer-00001.experts"])
def test_a_list_beside_other_files_than_were_opened_does_not_count(
    desk: WorkerDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    """Another store in this place, or this one copied again: the files that are open have holes."""
    folder = watched_part(desk, tmp_path, monkeypatch, [ExpertId(0, 1)])
    main = desk.welcome(desk.worker())
    other = replace(desk.store.manifest, fingerprint="0" * 32).to_json().encode()
    (folder / "next").write_bytes(other if file == "manifest.json" else (folder / file).read_bytes())
    (folder / "next").replace(folder / file)
    change_list(folder, held_text(MORE))
    assert has_been_looked_at(caplog, "is another store than this worker opened") == 1
    assert desk.store.held == {ExpertId(0, 1)}
    assert main.nothing_came()
