"""Blocks on disk: what comes back, and what is not read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from checkpoint.kv_blocks import KVBlock
from checkpoint.kv_files import KVDirectory
from scheduler.errors import ConfigError

KEYS = [bytes([number] * 20) for number in range(4)]


def block_of(number: int) -> KVBlock:
    rows = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
    rest = [{"is_initialized": True, "dtype": torch.bfloat16, "states": {0: torch.arange(3), 1: None}, "seen": 4}]
    return KVBlock(0, 4, {(0, "keys"): rows, (0, "values"): rows.transpose(1, 2)}, {(0, "keys"): 4}, rest)


def written(folder: Path, numbers: list[int], most_bytes: int = 1 << 20) -> list[Path]:
    directory = KVDirectory(folder, most_bytes, "model A")
    for number in numbers:
        directory.save(KEYS[number], block_of(number))
    directory.close()
    return sorted(folder.glob("*.kv*"), key=lambda path: path.name)


def test_a_block_comes_back_as_it_was(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [1])
    with safe_open(path, framework="pt") as file:  # the format's own reader
        assert torch.equal(file.get_tensor("rows/0/keys"), block_of(1).rows[0, "keys"])
    found, made = KVDirectory(tmp_path, 1 << 20, "model A").load(KEYS[1]), block_of(1)
    assert found is not None
    assert (found.start, found.stop, found.held) == (0, 4, {(0, "keys"): 4})
    assert torch.equal(found.rows[0, "keys"], made.rows[0, "keys"])
    assert torch.equal(found.rest[0].pop("states")[0], made.rest[0]["states"].pop(0))
    assert found.rest[0] == {"is_initialized": True, "dtype": torch.bfloat16, "seen": 4}


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "renamed", "other"])
def test_a_damaged_or_foreign_file_is_not_read(damage: str, tmp_path: Path, caplog: Any) -> None:
    first, second = written(tmp_path, [1, 2])
    data = first.read_bytes()
    if damage == "renamed":
        first.write_bytes(second.read_bytes())
    else:
        flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
        first.write_bytes({"cut": data[:-5], "bit": flipped, "empty": b"", "other": data}[damage])
    directory = KVDirectory(tmp_path, 1 << 20, "model B" if damage == "other" else "model A")
    assert directory.load(KEYS[1]) is None
    assert first.exists() is (damage == "other")
    if damage != "other":
        assert str(first) in caplog.text
        assert directory.load(KEYS[2]) is not None


def test_the_least_recently_used_give_way(tmp_path: Path) -> None:
    size = written(tmp_path, [0])[0].stat().st_size
    directory = KVDirectory(tmp_path, 3 * size + size // 2, "model A")
    for number in (1, 2):
        directory.save(KEYS[number], block_of(number))
    directory.close()
    directory.touch([KEYS[0]])
    assert len(written(tmp_path, [3], 3 * size + size // 2)) == 3  # a new start knows the times
    again = KVDirectory(tmp_path, 3 * size + size // 2, "model A")
    assert [again.load(key) is not None for key in KEYS] == [True, False, True, True]
    assert again.nbytes <= again.most_bytes


def test_a_full_disk_is_told_and_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert written(tmp_path, [0, 1]) == []
    assert caplog.text.count("No space left on device") == 1


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--kv-disk .*/file/kv cannot be used: Not a directory"):
        KVDirectory(tmp_path / "file" / "kv", 1, "model A")


def test_what_is_forgotten_does_not_come_back(tmp_path: Path) -> None:
    written(tmp_path, [0, 1])
    directory = KVDirectory(tmp_path, 1 << 20, "model A")
    directory.clear()
    assert directory.load(KEYS[0]) is None
    directory.close()
    assert list(tmp_path.glob("*.kv*")) == []


def test_a_directory_has_one_user(tmp_path: Path) -> None:
    first = KVDirectory(tmp_path, 1 << 20, "model A")
    with pytest.raises(ConfigError, match=f"{tmp_path} is used by another main node"):
        KVDirectory(tmp_path, 1 << 20, "model B")
    first.close()
    KVDirectory(tmp_path, 1 << 20, "model B").close()


def test_without_locks_a_directory_is_used_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS without a lock manager."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("checkpoint.kv_files.fcntl.flock", refuse)
    KVDirectory(tmp_path, 1 << 20, "model A").close()
    assert "cannot be locked (No locks available): let one main node use it" in caplog.text
