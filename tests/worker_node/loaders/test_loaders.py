"""Loads move exactly the blob, to the start of the slot, or say by name why not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import ConfigError, CorruptStoreError, StoreError
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.make import make_loader

BlobOf = Callable[[int, int], bytes]
each_loader = pytest.mark.parametrize("name", ["disk", "memory"])
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def never() -> bool:
    return False


def assert_loads(loader: Any, blob: BlobOf, layer: int, expert: int, spare: int = 4096) -> None:
    expected = blob(layer, expert)
    into = aligned_buffer(len(expected) + spare)
    into.fill_(0xA5)
    assert loader.load(layer, expert, into, never) == len(expected)
    assert bytes(into[: len(expected)].numpy()) == expected
    assert bool((into[len(expected) :] == 0xA5).all()), "more than the blob was written"


@each_loader
@settings(shared, max_examples=40)
@given(
    places=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=6), spare=st.integers(0, 5000)
)
def test_exactly_the_blob(
    store: ExpertStore, blob: BlobOf, name: str, places: list[tuple[int, int]], spare: int
) -> None:
    loader = make_loader(name, store)
    for layer, expert in places:
        assert_loads(loader, blob, layer, expert, spare)
    loader.close()


@each_loader
@pytest.mark.parametrize("piece", [4096, 8192])
def test_in_several_pieces(
    store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch, name: str, piece: int
) -> None:
    loader = make_loader(name, store)
    loader.piece_bytes = piece
    for expert in range(4):
        assert_loads(loader, blob, 1, expert)
    loader.close()


@each_loader
def test_after_close_it_opens_again(store: ExpertStore, blob: BlobOf, name: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    loader = make_loader(name, store)
    for _ in range(2):
        assert_loads(loader, blob, 0, 3)
        loader.close()
    loader.close()
    assert len(os.listdir("/proc/self/fd")) == before


@each_loader
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_load_that_is_given_up_stops_at_the_next_piece(
    store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    loader = make_loader(name, store)
    loader.piece_bytes = 4096
    into = aligned_buffer(store.manifest.blob_bytes)
    into.fill_(0xA5)
    asked = iter(range(100))
    assert loader.load(0, 2, into, lambda: next(asked) >= after) == after * 4096
    assert bytes(into[: after * 4096].numpy()) == blob(0, 2)[: after * 4096]
    assert bool((into[after * 4096 :] == 0xA5).all())
    assert_loads(loader, blob, 0, 2)
    loader.close()


@each_loader
@pytest.mark.parametrize("left", [0, 100, 4096, 4096 + 512, -1])
@pytest.mark.parametrize("opened", [False, True], ids=["before the first load", "between two loads"])
def test_file_cut_under_the_loader(own_store: ExpertStore, name: str, left: int, opened: bool) -> None:
    loader = make_loader(name, own_store)
    into = aligned_buffer(own_store.manifest.blob_bytes)
    file, _ = own_store.locate(1, 3)
    if opened:
        loader.load(1, 0, into, never)
    os.truncate(file, left if left >= 0 else file.stat().st_size + left)
    with pytest.raises(CorruptStoreError, match=file.name):
        loader.load(1, 3, into, never)
    loader.close()


@each_loader
def test_file_that_is_gone(own_store: ExpertStore, name: str) -> None:
    file, _ = own_store.locate(0, 0)
    file.unlink()
    with pytest.raises((OSError, StoreError), match=file.name):
        make_loader(name, own_store).load(0, 0, aligned_buffer(own_store.manifest.blob_bytes), never)


@each_loader
@pytest.mark.parametrize(("layer", "expert"), [(0, 4), (0, -1), (9, 0)])
def test_expert_that_does_not_exist(store: ExpertStore, name: str, layer: int, expert: int) -> None:
    with pytest.raises(StoreError, match=f"expert {expert} of layer {layer}"):
        make_loader(name, store).load(layer, expert, aligned_buffer(store.manifest.blob_bytes), never)


@each_loader
def test_the_store_stays_as_it_is(store: ExpertStore, name: str) -> None:
    """A slot is written to by nobody else, but were it so, the file would not be."""
    loader = make_loader(name, store)
    into = aligned_buffer(store.manifest.blob_bytes)
    loader.load(0, 0, into, never)
    into.fill_(0)
    loader.close()
    store.verify()


def test_unknown_loader(store: ExpertStore) -> None:
    with pytest.raises(ConfigError, match=r"'cloud'.*disk, memory, cuda, emulated"):
        make_loader("cloud", store)


@each_loader
def test_its_name_is_the_one_it_was_made_by(store: ExpertStore, name: str) -> None:
    assert make_loader(name, store).name == name


# --- O_DIRECT ---------------------------------------------------------------------------------------------------------


def test_file_system_that_refuses_direct_reads_at_open(
    store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    original = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        tried.append(flags & os.O_DIRECT)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return original(path, flags, *rest, **more)

    loader = DiskLoader(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for layer, expert in ((0, 0), (1, 2), (0, 3)):
            assert_loads(loader, blob, layer, expert)
    assert tried == [os.O_DIRECT, 0, 0]
    assert not loader.direct
    loader.close()


def test_file_system_that_refuses_direct_reads_at_read(
    store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.preadv
    loader = DiskLoader(store)

    def refuse(*args: Any) -> int:
        if loader.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        assert_loads(loader, blob, 0, 1)
        assert_loads(loader, blob, 1, 1)
    assert not loader.direct
    loader.close()


def test_any_other_error_is_not_swallowed(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("open", "preadv"):

        def broken(*args: Any, **more: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        loader = DiskLoader(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            with pytest.raises(OSError, match="Input/output error"):
                loader.load(0, 0, aligned_buffer(store.manifest.blob_bytes), never)
        loader.close()


@pytest.mark.parametrize("most", [1000, 4096, 5000])
def test_short_reads_are_gone_on_with(
    store: ExpertStore, blob: BlobOf, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    original = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda file, views, at: original(file, [views[0][:most]], at))
        loader = DiskLoader(store)
        assert_loads(loader, blob, 1, 2)
        loader.close()


def test_slot_that_is_not_aligned(store: ExpertStore, blob: BlobOf) -> None:
    """Slower, but right."""
    expected = blob(0, 1)
    into = aligned_buffer(len(expected) + 4096)[24:]
    loader = DiskLoader(store)
    assert loader.load(0, 1, into, never) == len(expected)
    assert bytes(into[: len(expected)].numpy()) == expected
    loader.close()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_in_shared_memory(store: ExpertStore, blob: BlobOf, request: pytest.FixtureRequest) -> None:
    folder = Path("/dev/shm") / f"odmoe-test-{os.getpid()}"
    request.addfinalizer(lambda: shutil.rmtree(folder, ignore_errors=True))
    loader = DiskLoader(ExpertStore.open(Path(shutil.copytree(store.path, folder))))
    for expert in range(4):
        assert_loads(loader, blob, 0, expert)
    loader.close()
