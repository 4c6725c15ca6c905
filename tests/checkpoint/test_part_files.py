"""Parts of a store as folders: their bytes, what they take on the disk, and how they are checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.held import HELD, held_text
from checkpoint.part_files import expert_sizes, extents_of, write_part
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, StoreWriteError
from scheduler.types import ExpertId

HELD_HERE = frozenset({ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 2)})


@pytest.fixture
def store(tiny_store: ExpertStore) -> ExpertStore:
    return add_forms(tiny_store, ["int4"])


@pytest.fixture
def part(store: ExpertStore, tmp_path: Path) -> ExpertStore:
    return write_part(store, tmp_path / "part", HELD_HERE, lambda nbytes: None)


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_part_has_the_experts_bytes_and_room_for_no_other(store: ExpertStore, part: ExpertStore) -> None:
    sizes = expert_sizes(store)
    assert sum(sizes.values()) == sum(
        f.stat().st_size for name in ("*.experts", "*.int4") for f in store.path.glob(name)
    )
    for form in ("", "int4"):
        for expert in HELD_HERE:
            (whole, blob), (file, same) = store.locate(*expert, form), part.locate(*expert, form)
            assert blob == same
            data = file.read_bytes()[blob.offset :][: blob.length]
            assert data == whole.read_bytes()[blob.offset :][: blob.length]
            assert any(data)
    of_files = disk_bytes(part.path) - sum(
        (part.path / name).stat().st_blocks * 512 for name in os.listdir(part.path) if name.endswith(".json")
    )
    assert of_files == sum(sizes[expert] for expert in HELD_HERE)
    assert part.manifest.model_digest == store.manifest.model_digest
    assert part.held == HELD_HERE


def test_neighbours_are_read_at_once(store: ExpertStore) -> None:
    assert [extent.file for extent in extents_of(store, HELD_HERE)] == [
        "layer-00000.experts",
        "layer-00000.int4",
        "layer-00001.experts",
        "layer-00001.int4",
    ]


def test_only_what_a_part_holds_is_checked(
    part: ExpertStore, tmp_path: Path, flip: Callable[[Path, int], None]
) -> None:
    assert part.verify().blobs == 2 * len(HELD_HERE)
    assert part.verify_once(tmp_path / "stamps")
    assert not part.verify_once(tmp_path / "stamps")
    file, blob = part.locate(0, 1)
    flip(file, 8 * blob.offset)
    with pytest.raises(CorruptStoreError, match="expert 1 of layer 0"):
        part.verify()
    flip(file, 8 * blob.offset)
    (part.path / HELD).write_text(held_text(HELD_HERE | {ExpertId(0, 2)}))  # a list that says too much
    with pytest.raises(CorruptStoreError, match="expert 2 of layer 0"):
        ExpertStore.open(part.path).verify()


def test_a_part_that_is_there_stays_and_another_is_refused(store: ExpertStore, part: ExpertStore) -> None:
    before = {file: file.stat().st_mtime_ns for file in part.path.iterdir()}
    assert write_part(store, part.path, HELD_HERE, lambda nbytes: None).held == HELD_HERE
    assert {file: file.stat().st_mtime_ns for file in part.path.iterdir()} == before
    with pytest.raises(StoreWriteError, match="another part of this one"):
        write_part(store, part.path, HELD_HERE - {ExpertId(0, 0)}, lambda nbytes: None)
