"""Writing a store where that cannot be done: the error says what is missing, and what is finished stays or goes."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoint import direct_io
from checkpoint.direct_io import Appender
from checkpoint.sharding import partial_store
from checkpoint.sharding.partial_store import partial_of
from checkpoint.sharding.shard import make_store
from checkpoint.sharding.source import Source, open_source
from checkpoint.store import ExpertStore
from scheduler.errors import StoreNotFoundError, StoreWriteError
from support.models.store_making import shard

MODEL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "dtype": "bfloat16"}
LAYER_BYTES = 4 * 3 * 64 * 256 * 2


@pytest.fixture(scope="module")
def disk() -> Iterator[Callable[[int], Path]]:
    """`disk(nbytes)`: a small file system of its own."""
    made: list[str] = []

    def mount(nbytes: int, *options: str) -> Path:
        where = tempfile.mkdtemp(prefix="odmoe-disk-")
        said = ",".join([f"size={nbytes}", *options])
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", said, "odmoe-test", where], capture_output=True, text=True)
        if done.returncode:
            os.rmdir(where)
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
        made.append(where)
        return Path(where)

    yield mount
    for where in made:
        subprocess.run(["umount", where], check=True)
        os.rmdir(where)


@pytest.fixture
def source(tiny: Callable[..., Path]) -> Source:
    """Six layers of 384 KiB."""
    return open_source(tiny("mixtral", **MODEL))


def figures(error: StoreWriteError) -> list[int]:
    return [int(text.replace(",", "")) for text in re.findall(r"([\d,]+)(?: bytes| are free)", str(error))]


def test_too_little_room_is_said_before_anything_is_written(disk: Callable[..., Path], source: Source) -> None:
    where = disk(1 << 20)
    with pytest.raises(StoreWriteError, match=r"needs [\d,]+ bytes more, [\d,]+ are free.*make room") as caught:
        shard(source, where / "store")
    needed, free = figures(caught.value)
    assert 6 * LAYER_BYTES < needed < 6 * LAYER_BYTES + 200_000
    assert (1 << 20) - 3 * 4096 <= free <= 1 << 20
    assert list(where.iterdir()) == []


def test_disk_that_fills_up_meanwhile(
    disk: Callable[..., Path], source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes the room after it was asked for. What is finished is taken up when there is room again."""
    where = disk(4 << 20)
    add = partial_store.Partial.add_layer

    def greedy(self: Any, layer: int, spec: Any) -> None:
        add(self, layer, spec)
        if layer == 2:
            left = os.statvfs(where)
            (where / "other").write_bytes(bytes(left.f_bavail * left.f_frsize - LAYER_BYTES // 2))

    with monkeypatch.context() as patch:
        patch.setattr(partial_store.Partial, "add_layer", greedy)
        with pytest.raises(StoreWriteError, match=r"the disk is full.*3 of 6 layers are kept.*remove") as caught:
            shard(source, where / "store")
    needed, _ = figures(caught.value)
    assert 3 * LAYER_BYTES < needed < 3 * LAYER_BYTES + 200_000
    with pytest.raises(StoreNotFoundError):
        ExpertStore.open(where / "store")
    with pytest.raises(StoreWriteError, match=r"needs [\d,]+ bytes more"):
        shard(source, where / "store")
    assert partial_of(where / "store").exists(), "what is finished outlives a second failure"
    (where / "other").unlink()
    made = make_store(source, where / "store")
    assert made.resumed == 3
    made.store.verify()
    assert made.store.manifest == shard(source, tmp_path / "store").manifest
    assert [p.name for p in where.iterdir()] == ["store"]


def test_place_that_cannot_be_renamed_to(disk: Callable[..., Path], source: Source) -> None:
    where = disk(8 << 20)
    with pytest.raises(StoreWriteError, match=f"{where} is where a file system is mounted.*{where}/store"):
        shard(source, where)
    assert not partial_of(where).exists()
    assert list(where.iterdir()) == []


def test_file_system_that_is_read_only(disk: Callable[..., Path], source: Source) -> None:
    where = disk(1 << 20, "ro")
    with pytest.raises(StoreWriteError, match=f"{where}/store: Read-only file system"):
        shard(source, where / "store")


def test_directory_of_another_user(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o555)
    with as_nobody(tmp_path), pytest.raises(StoreWriteError, match=r"theirs/store: Permission denied"):
        shard(open_source(copied), tmp_path / "theirs" / "store")
    assert list((tmp_path / "theirs").iterdir()) == []


@contextmanager
def as_nobody(tmp_path: Path) -> Iterator[None]:
    """Root may write everywhere, and so proves nothing."""
    if os.geteuid():
        yield
        return
    ours = [folder for folder in tmp_path.parents if "pytest-of" in str(folder)]  # one more with several processes
    folders = [tmp_path, tmp_path / "copied", *ours]
    modes = [folder.stat().st_mode for folder in folders]
    for folder in folders:
        folder.chmod(0o755)
    for file in (tmp_path / "copied").iterdir():
        file.chmod(0o644)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for folder, mode in zip(folders, modes, strict=True):
            folder.chmod(mode)


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    """The kernel refuses what is longer: what a quota does, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("vocab", "intermediate", "kept"), [(96, 512, 0), (2048, 8, 3)], ids=["experts", "dense"])
def test_file_that_the_kernel_refuses_to_make_longer(
    tiny: Callable[..., Path], tmp_path: Path, vocab: int, intermediate: int, kept: int
) -> None:
    source = open_source(tiny("mixtral", vocab_size=vocab, intermediate_size=intermediate))
    with pytest.raises(StoreWriteError, match="too large"), files_no_larger_than(100_000):
        shard(source, tmp_path / "store")
    assert partial_of(tmp_path / "store").exists() is bool(kept)
    made = make_store(source, tmp_path / "store")
    made.store.verify()
    assert made.resumed == kept
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("where", ["fsync", "mkdir", "rename", "copyfile"])
def test_the_call_that_fails_does_not_matter(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    import shutil

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = {"fsync": os, "copyfile": shutil, "mkdir": Path, "rename": Path}[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, full)
        with pytest.raises(StoreWriteError, match="the disk is full"):
            shard(open_source(copied), tmp_path / "store")
    assert not (tmp_path / "store").exists()
    shard(open_source(copied), tmp_path / "store").verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copied", "store"]


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    """Some refuse O_DIRECT when a file is opened, some when it is used."""
    import torch

    data = torch.randint(0, 256, (3 * 4096 + 17,), dtype=torch.uint8)
    real_open, real_write = os.open, os.pwrite

    def picky_open(file: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(file, flags, *rest)

    def picky_write(descriptor: int, *rest: Any) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_write(descriptor, *rest)

    if refuses == "open":
        monkeypatch.setattr(os, "open", picky_open)
    else:
        monkeypatch.setattr(os, "pwrite", picky_write)
    with Appender(tmp_path / "file") as out:
        out.append(data)
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
    assert b"".join(bytes(piece) for piece in direct_io.pieces(tmp_path / "file")) == data.numpy().tobytes()
