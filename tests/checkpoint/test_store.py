"""An expert store that something has happened to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import store as module
from checkpoint.manifest import MANIFEST
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, StoreError, StoreNotFoundError
from support.models.store_making import check_refused

Flip = Callable[[Path, int], None]
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_manifest_says_what_the_files_hold(tiny_store: ExpertStore) -> None:
    manifest = tiny_store.manifest
    assert manifest.moe_layers == (0, 1)
    assert manifest.experts == 3
    assert manifest.expert_bytes == sum(f.stat().st_size for f in tiny_store.path.glob("*.experts"))
    assert manifest.blob_bytes == manifest.expert_bytes // 6
    for layer in manifest.moe_layers:
        for expert in range(3):
            file, blob = tiny_store.locate(layer, expert)
            data = file.read_bytes()[blob.offset :][: blob.length]
            assert xxhash.xxh3_128(data).hexdigest() == blob.checksum
            assert blob.offset % 4096 == blob.length % 4096 == 0


@pytest.mark.parametrize(("layer", "expert"), [(0, 3), (0, -1), (1, 1 << 40), (2, 0), (-1, 0)])
def test_expert_that_does_not_exist(tiny_store: ExpertStore, layer: int, expert: int) -> None:
    with pytest.raises(StoreError, match=f"expert {expert} of layer {layer}"):
        tiny_store.locate(layer, expert)


def test_views_share_the_buffer_and_do_not_overlap(tiny_store: ExpertStore) -> None:
    buffer = torch.zeros(tiny_store.manifest.blob_bytes, dtype=torch.uint8)
    views = tiny_store.views(buffer, 1)
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "gate_up_proj": (96, 32),
        "down_proj": (32, 48),
    }
    for view in views.values():
        view.view(torch.uint8).add_(1)
    assert int(buffer.sum(dtype=torch.int64)) == sum(view.nbytes for view in views.values())
    assert int(buffer.max()) == 1


# --- flipped bits -----------------------------------------------------------------------------------------------------


@settings(shared, max_examples=150)
@given(data=st.data())
def test_any_flipped_bit_is_found(tiny_store: ExpertStore, flip: Flip, data: st.DataObject) -> None:
    """In a blob, its padding or a dense file: the error names the file."""
    files = sorted(f for f in tiny_store.path.rglob("*") if f.is_file() and f.name != MANIFEST)
    file = data.draw(st.sampled_from(files))
    bit = data.draw(st.integers(0, file.stat().st_size * 8 - 1))
    flip(file, bit)
    with pytest.raises(CorruptStoreError) as caught:
        ExpertStore.open(tiny_store.path).verify()
    assert file.name in str(caught.value)
    flip(file, bit)
    tiny_store.verify()


def test_padding_is_covered(tiny_store: ExpertStore, flip: Flip) -> None:
    file, blob = tiny_store.locate(1, 2)
    last = tiny_store.manifest.layers[1].tensors[-1]
    end = last.offset + torch.Size(last.shape).numel() * 2
    if end == blob.length:
        pytest.skip("these shapes leave no padding")
    flip(file, (blob.offset + blob.length) * 8 - 1)
    with pytest.raises(CorruptStoreError, match="expert 2 of layer 1"):
        tiny_store.verify()


def test_verify_tells_its_progress(tiny_store: ExpertStore) -> None:
    seen: list[tuple[int, int]] = []
    tiny_store.verify(lambda done, total: seen.append((done, total)))
    assert len(seen) == 6
    assert seen[-1][0] == seen[-1][1] == tiny_store.manifest.expert_bytes


# --- files that are missing or cut ------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 4096, -1])
def test_truncated_layer(tiny_store: ExpertStore, left: int) -> None:
    file, _ = tiny_store.locate(1, 0)
    os.truncate(file, left if left >= 0 else file.stat().st_size + left)
    check_refused(tiny_store, CorruptStoreError, file.name)


def test_layer_with_bytes_to_spare(tiny_store: ExpertStore) -> None:
    file, _ = tiny_store.locate(1, 0)
    os.truncate(file, file.stat().st_size + 4096)
    check_refused(tiny_store, CorruptStoreError, file.name)


def test_missing_layer(tiny_store: ExpertStore) -> None:
    file, _ = tiny_store.locate(0, 0)
    file.unlink()
    check_refused(tiny_store, CorruptStoreError, file.name, "missing")


def test_file_cut_after_it_was_opened(tiny_store: ExpertStore) -> None:
    file, _ = tiny_store.locate(0, 0)
    os.truncate(file, 4096)
    with pytest.raises(CorruptStoreError, match=file.name):
        tiny_store.verify()


def test_file_lost_after_it_was_opened(tiny_store: ExpertStore) -> None:
    file, _ = tiny_store.locate(0, 0)
    file.unlink()
    with pytest.raises(CorruptStoreError, match=file.name):
        tiny_store.verify()


@pytest.mark.parametrize("lost", ["dense-00000.safetensors", "config.json"])
def test_missing_dense_file(tiny_store: ExpertStore, lost: str) -> None:
    (tiny_store.dense / lost).unlink()
    with pytest.raises(CorruptStoreError, match=lost):
        tiny_store.verify()


def test_a_file_that_is_none_of_the_stores(tiny_store: ExpertStore) -> None:
    """A `generation_config.json` slipped in would change answers."""
    (tiny_store.dense / "more.json").write_text("{}")
    with pytest.raises(CorruptStoreError, match=r"more\.json is none of the store's files"):
        tiny_store.verify()


def test_the_dense_part_of_another_training(tiny_store: ExpertStore) -> None:
    """Whole, readable, of the same shapes, and not the one that belongs to these experts."""
    from safetensors.torch import load_file, save_file

    file = tiny_store.dense / "dense-00000.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(CorruptStoreError, match=file.name):
        tiny_store.verify()


def test_no_store(tmp_path: Path, tiny_store: ExpertStore) -> None:
    for path in (tmp_path / "nowhere", tmp_path, tiny_store.path / MANIFEST):
        with pytest.raises(StoreNotFoundError, match="odmoe shard"):
            ExpertStore.open(path)


# --- verified once ----------------------------------------------------------------------------------------------------


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The stores that were read, one entry a reading."""
    seen: list[Path] = []
    original = ExpertStore.verify
    monkeypatch.setattr(ExpertStore, "verify", lambda self, *a: (seen.append(self.path), original(self, *a))[1])
    return seen


def test_verify_once_reads_once_and_again_after_a_change(
    tiny_store: ExpertStore, tmp_path: Path, verified: list[Path]
) -> None:
    stamps = tmp_path / "cache" / "stamps"
    assert tiny_store.verify_once(stamps) is True
    assert tiny_store.verify_once(stamps) is False
    assert ExpertStore.open(tiny_store.path).verify_once(stamps) is False
    assert len(verified) == 1
    file, _ = tiny_store.locate(0, 1)
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # size and time as before: the change time tells
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=file.name):
            tiny_store.verify_once(stamps)
    data[5000] ^= 1
    file.write_bytes(data)
    assert tiny_store.verify_once(stamps) is True
    assert tiny_store.verify_once(stamps) is False


def test_verify_once_sees_a_dense_change_and_a_new_file(
    tiny_store: ExpertStore, tmp_path: Path, verified: list[Path]
) -> None:
    stamps = tmp_path / "stamps"
    tiny_store.verify_once(stamps)
    (tiny_store.dense / "config.json").write_text("{}")
    with pytest.raises(CorruptStoreError, match=r"config\.json"):
        tiny_store.verify_once(stamps)


def test_two_stores_have_two_stamps(
    tiny_store: ExpertStore, tmp_path: Path, tiny: Callable[..., Path], store_of: Callable[..., ExpertStore]
) -> None:
    stamps = tmp_path / "stamps"
    other = store_of(tiny("olmoe", "bfloat16"))
    assert tiny_store.verify_once(stamps)
    assert other.verify_once(stamps)
    assert not tiny_store.verify_once(stamps)
    assert len(list(stamps.iterdir())) == 2


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/odmoe"])
def test_stamps_that_cannot_be_written_cost_a_reading_each_time(
    tiny_store: ExpertStore, tmp_path: Path, verified: list[Path], where: str
) -> None:
    (tmp_path / "file").write_text("mine")
    for _ in range(2):
        assert tiny_store.verify_once(tmp_path / where) is True
    assert len(verified) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_damaged_stamp_costs_a_reading(tiny_store: ExpertStore, tmp_path: Path, verified: list[Path]) -> None:
    tiny_store.verify_once(tmp_path / "stamps")
    (stamp,) = (tmp_path / "stamps").iterdir()
    stamp.write_bytes(b"\xff\xfe")
    assert tiny_store.verify_once(tmp_path / "stamps") is True
    assert tiny_store.verify_once(tmp_path / "stamps") is False


def test_checksums_are_the_librarys(tmp_path: Path) -> None:
    data = os.urandom((1 << 22) + 77)
    (tmp_path / "file").write_bytes(data)
    assert module.file_checksum(tmp_path / "file") == module.checksum(data) == xxhash.xxh3_128(data).hexdigest()
