"""A worker whose experts travel and lie in slots in fewer bits, beside Transformers on weights that HQQ restored."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.forms import FORMS
from checkpoint.native.parameters import restoring_bytes
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_from_bytes
from scheduler.emulation.clock import Emulation
from scheduler.errors import ConfigError, StoreError
from scheduler.timing.profile import find_profile
from support.models.hqq_reference import by_hqq
from support.nodes.stepping_clock import SteppingClock
from support.nodes.worker_desk import Expected, WorkerDesk
from wire.messages import Evict, Load, Loaded, WorkerReady
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.emulated import EmulatedLoader
from worker_node.loaders.make import make_loader
from worker_node.loaders.memory import MemoryLoader
from worker_node.loaders.slab import HostSlab

PROFILE = find_profile("rtx3090-1gbe")
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(scope="module")
def formed(store: ExpertStore, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """The session's store with both forms."""
    copied = shutil.copytree(store.path, tmp_path_factory.mktemp("formed") / "store")
    return add_forms(ExpertStore.open(Path(copied)), tuple(FORMS))


@pytest.fixture
def forming(desk: WorkerDesk, formed: ExpertStore) -> Any:
    """The desk, whose workers have the store with forms."""
    desk.store = formed
    return desk


@pytest.fixture(scope="module")
def expected_in(model: Any, expected: Expected) -> Any:
    """form -> what Transformers' eager experts make of rows, their weights quantised and restored by HQQ."""
    found = {"": expected}
    for form, bits in FORMS.items():
        other = copy.deepcopy(model)
        with torch.no_grad():
            for layer in other.model.layers:
                for weight in layer.mlp.experts.parameters():
                    for expert in range(len(weight)):
                        weight[expert] = by_hqq(weight[expert], bits)
        found[form] = type(expected)(other)
    return found


# --- what is computed -------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("loader", ["disk", "memory"])
def test_loaded_and_computed_as_the_weights_that_hqq_restores(
    forming: WorkerDesk, expected_in: Any, formed: ExpertStore, form: str, loader: str
) -> None:
    worker = forming.worker(loader=make_loader(loader, formed, forms=(form,)), forms=(form,))
    main = forming.connect(worker)
    main.send(forming.hello())
    ready = main.next()
    assert isinstance(ready, WorkerReady)
    assert ready.slot_bytes == formed.manifest.form_bytes(form) < formed.manifest.blob_bytes
    assert ready.load_bytes_per_s > 0
    for number in range(8):
        layer, expert, slot = number % 2, number // 2, number % 2
        main.send(Load(number + 1, slot, layer, expert, form))
        loaded = main.next()
        assert isinstance(loaded, Loaded)
        file, blob = formed.locate(layer, expert, form)
        assert loaded.nbytes == blob.length
        assert bytes(worker.slots.buffers[slot].numpy()) == file.read_bytes()[blob.offset :][: blob.length]
        asked = forming.compute(100 + number, slot, layer, expert, rows=number + 1)
        main.send(asked)
        assert expected_in[form].fits(main.next(), asked)
        assert not expected_in[""].fits(worker_answer(main, forming, number, slot, layer, expert, form), asked)
    assert main.usage().loads == 16


def worker_answer(main: Any, desk: WorkerDesk, number: int, slot: int, layer: int, expert: int, form: str) -> Any:
    """The same once more, from a fresh load."""
    main.send(Load(50 + number, slot, layer, expert, form))
    main.next()
    main.send(desk.compute(100 + number, slot, layer, expert, rows=number + 1))
    return main.next()


def test_every_form_in_turn_in_the_same_slot(forming: WorkerDesk, expected_in: Any, formed: ExpertStore) -> None:
    """What is bound to a slot in one form must not be taken for another."""
    worker = forming.worker(slots=1, loader=DiskLoader(formed), forms=("", "int4", "int2"))
    main = forming.welcome(worker)
    for number in range(18):
        form = ("", "int4", "int2")[number % 3]
        asked = forming.compute(100 + number, 0, number % 2, number * 3 % 4, rows=5)
        main.send(Load(number + 1, 0, asked.layer, asked.expert, form), asked)
        answers = main.hear(2)
        assert expected_in[form].fits(answers["Computed", asked.call_id], asked), (number, form)


def test_a_form_that_a_stranger_made_up_is_refused_in_few_words(forming: WorkerDesk) -> None:
    main = forming.welcome(forming.worker(forms=("", "int4")))
    main.send(Load(1, 0, 0, 0, "\0" * 100_000))
    said = main.failure("ProtocolError", load_id=1).message
    assert "Load.form is 100000 long" in said
    assert len(said) < 200
    main.send(Load(2, 0, 0, 0, "\0" * 1000))
    said = main.failure("ProtocolError", load_id=2).message
    assert "it was started for '', 'int4'" in said
    assert len(said) < 200


def test_computations_of_two_streams_do_not_meet_where_experts_are_restored(
    forming: WorkerDesk, expected_in: Any
) -> None:
    """The main node that has just been replaced may still be computing."""
    worker = forming.worker(slots=2, forms=("int4",))
    old = forming.welcome(worker)
    for number in range(30):
        mine = forming.compute(1000 + number, 0, 0, number % 4, rows=9, evict=False)
        old.send(Load(number + 1, 0, 0, number % 4, "int4"), mine)
        old.hear(2)
        old.send(mine, Evict(0))
        new = forming.welcome(worker)
        asked = forming.compute(2000 + number, 1, 1, number % 4, rows=2)
        new.send(Load(100 + number, 1, 1, number % 4, "int4"), asked)
        assert expected_in["int4"].fits(new.hear(2)["Computed", asked.call_id], asked)
        old = new


# --- emulated time ----------------------------------------------------------------------------------------------------


def test_restoring_takes_the_profiles_time_until_another_expert_was_restored(forming: WorkerDesk) -> None:
    """Computations of 10 ms. A slot in full needs no restoring, and leaves the restored expert as it is."""
    profile = replace(PROFILE, load_s=0.0, restore_s=0.5, expert_s=0.01, expert_extra_s=0.0)
    emulation = Emulation(profile)
    loader = EmulatedLoader(MemoryLoader(forming.store), emulation)
    worker = forming.worker(slots=3, loader=loader, forms=("", "int4"))
    assert worker.costs == (0.01, 0.0), "for a slot with room for the full form"
    main = forming.welcome(worker)
    for slot, form in enumerate(("int4", "int4", "")):
        main.send(Load(slot + 1, slot, 0, slot, form))
        main.next()
    found = []
    for call, slot in enumerate((0, 0, 2, 0, 1, 0)):
        main.send(forming.compute(100 + call, slot, 0, slot, evict=False))
        found.append(main.next().seconds)
    assert found == pytest.approx([0.51, 0.01, 0.01, 0.01, 0.51, 0.51])
    main.send(Evict(0), Load(9, 0, 0, 0, "int4"))
    main.next()
    main.send(forming.compute(200, 0, 0, 0))
    assert main.next().seconds == pytest.approx(0.51), "the same expert, loaded again"


def test_a_worker_of_a_smaller_form_says_that_computations_restore(forming: WorkerDesk) -> None:
    emulation = Emulation(replace(PROFILE, load_s=0.0, restore_s=0.5, expert_s=0.01, expert_extra_s=0.002))
    worker = forming.worker(loader=EmulatedLoader(MemoryLoader(forming.store), emulation), forms=("int4",))
    assert worker.costs == pytest.approx((0.508, 0.002))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_that_is_said_is_memory_that_is_held(forming: WorkerDesk, formed: ExpertStore) -> None:
    """Slots, one restored expert in full, and float32 and uint8 of the largest weight."""
    manifest = formed.manifest
    main = forming.welcome(forming.worker(slots=3, forms=("int4", "int2")))
    largest = max(torch.Size(tensor.shape).numel() for tensor in manifest.layers[0].tensors)
    held = 3 * manifest.form_bytes("int4") + manifest.blob_bytes + 5 * largest
    assert main.usage().device_bytes_max == held
    assert restoring_bytes(formed.manifest, ("", "int4", "int2"), "cpu", 1) == held - 3 * manifest.form_bytes("int4")
    assert restoring_bytes(formed.manifest, ("",), "cpu", 1) == 0
    plain = forming.welcome(forming.worker(slots=3))
    assert plain.usage().device_bytes_max == 3 * manifest.blob_bytes


def test_the_slab_holds_the_forms_that_are_loaded(formed: ExpertStore) -> None:
    slab = HostSlab(formed, False, ("int4", "int2"))
    assert slab.memory.nbytes == sum(form.expert_bytes for form in formed.manifest.forms.values())
    for form in FORMS:
        file, blob = formed.locate(1, 2, form)
        assert bytes(slab.blob(1, 2, form).numpy()) == file.read_bytes()[blob.offset :][: blob.length]
    with pytest.raises(StoreError, match="no expert 0 of layer 0 was"):
        slab.blob(0, 0)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["int2", "", "int3"])
def test_a_form_that_the_worker_was_not_started_for(forming: WorkerDesk, expected_in: Any, form: str) -> None:
    main = forming.welcome(forming.worker(forms=("int4",)))
    main.send(Load(1, 0, 0, 0, form))
    answer = main.failure("ProtocolError", load_id=1)
    assert f"does not load experts in form {form!r}; it was started for 'int4'" in answer.message
    asked = forming.compute(2, 0, 0, 0)
    main.send(Load(3, 0, 0, 0, "int4"), asked)
    assert expected_in["int4"].fits(main.hear(2)["Computed", 2], asked)


def test_no_form_at_all(forming: WorkerDesk) -> None:
    with pytest.raises(ConfigError, match="no form"):
        forming.worker(forms=())


@pytest.mark.parametrize("wanted", [("int4",), ("", "int2")])
def test_a_store_that_lacks_the_form(desk: WorkerDesk, wanted: tuple[str, ...]) -> None:
    with pytest.raises(StoreError, match=rf"no experts in form '{wanted[-1]}'.*--forms {wanted[-1]}"):
        desk.worker(forms=wanted)


# --- emulated ---------------------------------------------------------------------------------------------------------


@forms
def test_an_emulated_load_lasts_as_much_less_as_it_is_smaller(
    forming: WorkerDesk, formed: ExpertStore, form: str, stepping_clock: SteppingClock
) -> None:
    loader = EmulatedLoader(MemoryLoader(formed), Emulation(replace(PROFILE, load_s=0.4), stepping_clock))
    worker = forming.worker(loader=loader, forms=("", form))
    assert worker.costs == PROFILE.device_costs
    share = formed.manifest.form_bytes(form) / formed.manifest.blob_bytes
    main = forming.welcome(worker)
    for load_id, (said, lasts) in enumerate({"": 0.4, form: 0.4 * share}.items(), 1):
        main.send(Load(load_id, load_id - 1, 0, 0, said))
        answer = main.next()
        assert isinstance(answer, Loaded)
        assert answer.seconds == pytest.approx(lasts)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@forms
def test_restored_on_a_gpu_as_on_a_processor(forming: WorkerDesk, formed: ExpertStore, model: Any, form: str) -> None:
    """The same weights to the last bit; computed there as Transformers computes there."""
    loader = make_loader("cuda", formed, forms=("", form))
    worker = forming.worker(slots=2, loader=loader, forms=("", form))
    main = forming.welcome(worker)
    other = copy.deepcopy(model.model.layers[1].mlp.experts).cuda()
    with torch.no_grad():
        for weight, host in zip(other.parameters(), model.model.layers[1].mlp.experts.parameters(), strict=True):
            for expert in range(len(weight)):
                weight[expert] = by_hqq(host[expert], FORMS[form])
    for number in range(6):
        asked = forming.compute(100 + number, number % 2, 1, number % 4, rows=number + 1)
        main.send(Load(number + 1, asked.slot, 1, asked.expert, form), asked)
        answer = main.hear(2)["Computed", asked.call_id]
        hidden, weights = (tensor_from_bytes(t.dtype, t.shape, t.data).cuda() for t in (asked.hidden, asked.weights))
        with torch.inference_mode():
            wanted = other(hidden, torch.full((len(hidden), 1), asked.expert, device="cuda"), weights.view(-1, 1))
        found = tensor_from_bytes(answer.output.dtype, answer.output.shape, answer.output.data)
        assert torch.equal(found, wanted.cpu())
