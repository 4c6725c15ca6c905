"""Forms that are added to a store: what is in their files, and what becomes of them when something goes wrong."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.forms import FORMS, restore
from checkpoint.manifest import seal
from checkpoint.sharding import form_files
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from scheduler.errors import ConfigError, CorruptStoreError, StoreError, StoreMismatchError
from support.models.hqq_reference import by_hqq

Flip = Callable[[Path, int], None]
BOTH = ("int4", "int2")


@pytest.fixture(scope="module")
def kept(tiny: Any, store_of: Callable[..., ExpertStore], tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """A store that has both forms: 2 layers of 3 experts."""
    made = store_of(tiny("mixtral", "bfloat16", num_local_experts=3, num_hidden_layers=2))
    copied = shutil.copytree(made.path, tmp_path_factory.mktemp("kept") / "store")
    return add_forms(ExpertStore.open(Path(copied)), BOTH)


@pytest.fixture
def formed(kept: ExpertStore, tmp_path: Path) -> ExpertStore:
    """The same, to damage."""
    return ExpertStore.open(Path(shutil.copytree(kept.path, tmp_path / "formed")))


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forms that experts were quantised to, one entry an expert."""
    seen: list[str] = []
    quantise = form_files.quantise
    monkeypatch.setattr(form_files, "quantise", lambda p, layer, form: (seen.append(form), quantise(p, layer, form))[1])
    return seen


def files(store: ExpertStore) -> dict[str, int]:
    return {str(p.relative_to(store.path)): p.stat().st_mtime_ns for p in store.path.rglob("*") if p.is_file()}


def read(store: ExpertStore, layer: int, expert: int, form: str = "") -> torch.Tensor:
    """A blob, by the plainest means."""
    file, blob = store.locate(layer, expert, form)
    return torch.frombuffer(bytearray(file.read_bytes()[blob.offset :][: blob.length]), dtype=torch.uint8)


# --- what is in them --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("mixtral", "float32"),
        ("mixtral", "bfloat16"),
        ("qwen2_moe", "bfloat16"),
        ("gpt_oss", "float32"),
        ("deepseek_v3", "bfloat16"),
    ],
)
def test_every_expert_of_a_family(
    family: str, dtype: str, tiny: Any, store_of: Callable[..., ExpertStore], tmp_path: Path
) -> None:
    """Fused, with shared experts, with biases and transposed weights, with dense layers before."""
    store = store_of(tiny(family, dtype))
    store = add_forms(ExpertStore.open(Path(shutil.copytree(store.path, tmp_path / "store"))), BOTH)
    store.verify()
    for number, layer in store.manifest.layers.items():
        for expert in range(len(layer.blobs)):
            full = store.views(read(store, number, expert), number)
            for form, bits in FORMS.items():
                found = restore(read(store, number, expert, form), layer, form)
                assert found.keys() == full.keys()
                for name, value in full.items():
                    expected = by_hqq(value, bits) if value.dim() > 1 else value
                    assert torch.equal(found[name], expected), (number, expert, form, name)


def test_the_size_of_a_slot(formed: ExpertStore) -> None:
    manifest = formed.manifest
    assert manifest.form_bytes("") == manifest.blob_bytes
    for form in BOTH:
        sizes = [file.stat().st_size for file in formed.path.glob(f"*.{form}")]
        assert sizes == [3 * manifest.form_bytes(form)] * 2
    assert manifest.form_bytes("int2") <= manifest.form_bytes("int4") < manifest.form_bytes("")  # whole pages


def test_a_store_without_forms(tiny_store: ExpertStore) -> None:
    assert tiny_store.manifest.forms == {}
    with pytest.raises(StoreError, match=r"no experts in form 'int4', it has none but.*odmoe shard .* --forms int4"):
        tiny_store.manifest.form_bytes("int4")
    with pytest.raises(StoreError, match="int2"):
        tiny_store.locate(0, 0, "int2")


def test_forms_leave_the_rest_as_it_was(tiny_store: ExpertStore) -> None:
    before = files(tiny_store)
    assert add_forms(tiny_store, ()) is add_forms(tiny_store, ("",)) is tiny_store
    store = add_forms(tiny_store, ("", "int2"))
    assert list(store.manifest.forms) == ["int2"]
    with pytest.raises(StoreError, match="it has int2"):
        store.manifest.form("int4")
    after = files(store)
    assert {name: when for name, when in after.items() if name in before} == before
    assert after.keys() - before.keys() == {"int2.json", "layer-00000.int2", "layer-00001.int2"}
    assert not list(store.path.glob(".*"))


def test_what_is_there_is_not_made_again(formed: ExpertStore, quantised: list[str]) -> None:
    before = files(formed)
    assert add_forms(formed, BOTH).manifest == formed.manifest
    assert (files(formed), quantised) == (before, [])


def test_progress_is_told_of_each_expert(tiny_store: ExpertStore) -> None:
    told: list[tuple[str, int, int]] = []
    made = add_forms(tiny_store, BOTH, lambda *said: told.append(said))
    for form in BOTH:
        sizes = [blob.length for layer in made.manifest.forms[form].layers.values() for blob in layer.blobs]
        steps = list(itertools.accumulate(sizes))
        assert [said for said in told if said[0] == form] == [(form, done, steps[-1]) for done in steps]


@pytest.mark.parametrize("form", ["int3", "INT4", "../int4", "full"])
def test_a_form_that_is_unknown(tiny_store: ExpertStore, form: str) -> None:
    before = files(tiny_store)
    with pytest.raises(ConfigError, match="allowed: int4, int2"):
        add_forms(tiny_store, ("int4", form))
    assert files(tiny_store) == before


# --- stopped ----------------------------------------------------------------------------------------------------------


def stop(store: ExpertStore, experts: int) -> None:
    """A run that is interrupted when so many are done."""

    def interrupt(what: str, done: int, total: int) -> None:
        if done == experts * total // 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_forms(store, ("int4",), interrupt)
    assert ExpertStore.open(store.path).manifest.forms == {}, "half a form is none"


@pytest.mark.parametrize(("experts", "again"), [(1, 6), (3, 6), (4, 3), (5, 3)])
def test_finished_layers_are_taken_up_again(
    tiny_store: ExpertStore, quantised: list[str], experts: int, again: int
) -> None:
    """A layer is finished once it is synced and in the journal: after its last expert was told of."""
    stop(tiny_store, experts)
    quantised.clear()
    store = add_forms(tiny_store, ("int4",))
    assert len(quantised) == again
    store.verify()
    assert not list(store.path.glob(".*"))


def test_a_finished_layer_that_has_changed_since_is_made_again(
    tiny_store: ExpertStore, quantised: list[str], flip: Flip
) -> None:
    stop(tiny_store, 5)
    flip(tiny_store.path / ".int4.partial" / "layer-00000.int4", 8 * 5000)
    quantised.clear()
    add_forms(tiny_store, ("int4",)).verify()
    assert len(quantised) == 6


def test_stopped_while_its_files_were_moved(
    tiny_store: ExpertStore, quantised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def once(self: Path, target: Path) -> Path:
        if self.name == "layer-00001.int4":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", once)
        with pytest.raises(KeyboardInterrupt):
            add_forms(tiny_store, ("int4",))
    assert (tiny_store.path / "layer-00000.int4").is_file()
    assert ExpertStore.open(tiny_store.path).manifest.forms == {}
    quantised.clear()
    add_forms(tiny_store, ("int4",)).verify()
    assert quantised == []


# --- damaged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", BOTH)
def test_one_bit_is_found(formed: ExpertStore, form: str, flip: Flip) -> None:
    file = formed.path / f"layer-00001.{form}"
    flip(file, 8 * formed.manifest.form_bytes(form) + 77)
    with pytest.raises(CorruptStoreError) as caught:
        ExpertStore.open(formed.path).verify()
    for word in ("expert 1 of layer 1", str(file), f"remove {formed.path / form}.json", f"--forms {form}"):
        assert word in str(caught.value)


def test_the_advice_helps(formed: ExpertStore, flip: Flip) -> None:
    flip(formed.path / "layer-00001.int4", 4)
    (formed.path / "int4.json").unlink()
    add_forms(ExpertStore.open(formed.path), BOTH).verify()


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_file_of_another_size_is_refused_at_once(formed: ExpertStore, damage: str) -> None:
    file = formed.path / "layer-00000.int2"
    file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(CorruptStoreError, match=r"layer-00000\.int2 is (missing|\d+ bytes).*--forms int2"):
        ExpertStore.open(formed.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(fingerprint="0" * 32),
        lambda f: f.update(dtype="float32"),
        lambda f: f.update(form="int2"),
        lambda f: f.update(bits=2),
        lambda f: f.update(group=32),
        lambda f: f.update(group=0),
        lambda f: f["layers"].pop("1"),
        lambda f: f.update(layers={}),
        lambda f: f["layers"]["0"].update(file="../layer-00000.int4"),
        lambda f: f["layers"]["0"].update(file="layer-00001.int4"),
        lambda f: f["layers"]["0"]["tensors"].pop(),
        lambda f: f["layers"]["0"]["tensors"][0].update(dtype="bfloat16"),
        lambda f: f["layers"]["0"]["blobs"].pop(),
        lambda f: f.update(more=1),
        lambda f: f.pop("layers"),
    ],
)
def test_a_manifest_of_a_form_that_cannot_be(formed: ExpertStore, change: Callable[[dict[str, Any]], object]) -> None:
    where = formed.path / "int4.json"
    fields = json.loads(where.read_text())
    change(fields)
    where.write_text(json.dumps(seal(fields)))
    with pytest.raises(CorruptStoreError, match=r"int4\.json.*remove .*--forms int4"):
        ExpertStore.open(formed.path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": 1}', "\xff"])
def test_a_manifest_of_a_form_that_is_none(formed: ExpertStore, text: str) -> None:
    (formed.path / "int4.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptStoreError, match=r"int4\.json is damaged.*--forms int4"):
        ExpertStore.open(formed.path)


def test_a_form_of_a_later_version(formed: ExpertStore) -> None:
    where = formed.path / "int4.json"
    where.write_text(json.dumps(seal(json.loads(where.read_text()) | {"format": 2})))
    with pytest.raises(StoreMismatchError, match=r"format 2, this version reads 1.*--forms int4"):
        ExpertStore.open(formed.path)


def test_damaged_experts_are_not_quantised(tiny_store: ExpertStore, flip: Flip) -> None:
    flip(tiny_store.path / "layer-00001.experts", 3)
    with pytest.raises(CorruptStoreError, match="expert 0 of layer 1"):
        add_forms(tiny_store, ("int4",))
    assert ExpertStore.open(tiny_store.path).manifest.forms == {}


def test_torch_keeps_its_threads(kept: ExpertStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert is quantised with one thread. Threads that start later have as many as before."""
    quantise, during, later = form_files.quantise, set(), []

    def counting(*given: Any) -> torch.Tensor:
        during.add(torch.get_num_threads())
        return quantise(*given)

    monkeypatch.setattr(form_files, "quantise", counting)
    copied = Path(shutil.copytree(kept.path, tmp_path / "copied"))
    (copied / "int4.json").unlink()
    torch.set_num_threads(2)
    try:
        add_forms(ExpertStore.open(copied), ("int4",))
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join(60)
        assert (during, later, torch.get_num_threads()) == ({1}, [2], 2)
    finally:
        torch.set_num_threads(1)
