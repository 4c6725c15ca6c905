"""A manifest that anyone may have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.manifest import MANIFEST, seal
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, StoreError, StoreMismatchError
from support.models.store_making import check_refused

Flip = Callable[[Path, int], None]
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def edit(store: ExpertStore, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((store.path / MANIFEST).read_text())
    change(manifest)
    (store.path / MANIFEST).write_text(json.dumps(seal(manifest)))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"format": 2}', b"[" * 30_000])
def test_manifest_that_is_no_manifest(tiny_store: ExpertStore, text: bytes) -> None:
    (tiny_store.path / MANIFEST).write_bytes(text)
    check_refused(tiny_store, CorruptStoreError, MANIFEST)


@pytest.mark.parametrize("version", [0, 1, 5, "2", None])
def test_other_format_version(tiny_store: ExpertStore, version: object) -> None:
    edit(tiny_store, lambda m: m.update(format=version))
    check_refused(tiny_store, StoreMismatchError, MANIFEST, str(version))


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "dense/config.json", "..", ".", "", "a\0b"])
def test_file_name_that_leads_elsewhere(tiny_store: ExpertStore, name: str) -> None:
    (tiny_store.path.parent / "escape").write_bytes((tiny_store.locate(0, 0)[0]).read_bytes())
    edit(tiny_store, lambda m: m["layers"]["0"].update(file=name))
    check_refused(tiny_store, CorruptStoreError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 17),
        ("offset", 2048),
        ("offset", -4096),
        ("offset", 1 << 40),
        ("offset", 1 << 70),
        ("offset", "0"),
        ("offset", 4096.0),
        ("offset", None),
        ("length", 0),
        ("length", -4096),
        ("length", 100),
        ("length", 1 << 40),
        ("length", "4096"),
        ("checksum", 5),
    ],
)
def test_blob_that_cannot_be(tiny_store: ExpertStore, field: str, value: object) -> None:
    edit(tiny_store, lambda m: m["layers"]["1"]["blobs"][2].update({field: value}))
    check_refused(tiny_store, CorruptStoreError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", -64),
        ("offset", 1),
        ("offset", 1 << 40),
        ("offset", "64"),
        ("shape", [96, 1 << 20]),
        ("shape", [-1, 32]),
        ("shape", [-96, -32]),
        ("shape", ["96", 32]),
        ("shape", [1 << 62, 1 << 62]),
        ("shape", 5),
        ("dtype", "float8"),
        ("dtype", 7),
        ("dtype", ["bfloat16"]),
        ("name", 3),
    ],
)
def test_tensor_that_cannot_be(tiny_store: ExpertStore, field: str, value: object) -> None:
    edit(tiny_store, lambda m: m["layers"]["1"]["tensors"][-1].update({field: value}))
    check_refused(tiny_store, CorruptStoreError)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(layers={}),
        lambda m: m.update(layers=[]),
        lambda m: m["layers"].update(x=m["layers"]["0"]),
        lambda m: m["layers"]["0"].update(blobs=[]),
        lambda m: m["layers"]["0"].update(module=3),
        lambda m: m["layers"]["0"].update(file=3),
        lambda m: m.update(config=[]),
        lambda m: m.update(fingerprint=None),
        lambda m: m.update(dtype=2),
        lambda m: m.update(dtype="float64"),
        lambda m: m.update(family=[]),
        lambda m: m.update(extra=1),
        lambda m: m.pop("config"),
    ],
)
def test_manifest_that_cannot_be(tiny_store: ExpertStore, change: Callable[[dict[str, Any]], object]) -> None:
    edit(tiny_store, change)
    check_refused(tiny_store, CorruptStoreError, MANIFEST)


def test_tensors_of_another_dtype_than_the_manifest_says(tiny_store: ExpertStore) -> None:
    """As stores of Qwen3-VL-MoE were made with --dtype float32: nothing that read them could answer."""
    edit(tiny_store, lambda m: m.update(dtype="float32"))
    check_refused(tiny_store, CorruptStoreError, MANIFEST, "says float32", "is bfloat16", "make the store again")


def use(store: ExpertStore) -> None:
    """Everything that a node does with a store that opened."""
    manifest = store.manifest
    buffer = torch.zeros(manifest.blob_bytes, dtype=torch.uint8)
    for layer in manifest.moe_layers:
        store.views(buffer, layer)
        store.locate(layer, 0)
    store.verify()


@settings(shared, max_examples=200)
@given(data=st.data())
def test_any_flipped_bit_of_the_manifest_gives_a_named_error_or_none(
    tiny_store: ExpertStore, flip: Flip, data: st.DataObject
) -> None:
    file = tiny_store.path / MANIFEST
    bit = data.draw(st.integers(0, file.stat().st_size * 8 - 1))
    flip(file, bit)
    try:
        use(ExpertStore.open(tiny_store.path))
    except StoreError:
        pass
    finally:
        flip(file, bit)


def paths(value: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [so_far, *(path for key, child in children for path in paths(child, (*so_far, key)))]


@pytest.mark.slow
@settings(shared, max_examples=200)
@given(data=st.data())
def test_anything_in_place_of_any_field_gives_a_named_error_or_none(
    tiny_store: ExpertStore, data: st.DataObject
) -> None:
    file = tiny_store.path / MANIFEST
    before = file.read_text()
    manifest = json.loads(before)
    where = data.draw(st.sampled_from(paths({k: v for k, v in manifest.items() if k != "config"})[1:]))
    leaf = st.none() | st.booleans() | st.integers(-(1 << 66), 1 << 66) | st.floats() | st.text(max_size=5)
    value = data.draw(leaf | st.lists(leaf, max_size=3) | st.dictionaries(st.text(max_size=3), leaf, max_size=2))
    inside = manifest
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    file.write_text(json.dumps(seal(manifest)))
    try:
        use(ExpertStore.open(tiny_store.path))
    except StoreError:
        pass
    finally:
        file.write_text(before)
