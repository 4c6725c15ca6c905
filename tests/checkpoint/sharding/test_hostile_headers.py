"""Headers of safetensors files that a stranger wrote: each is refused by name, and never more is accepted than the
library safetensors itself accepts."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from checkpoint.sharding.source import open_source
from scheduler.errors import CorruptCheckpointError, ODMoEError

HEADERS = 300
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 2**64, 1e300, float("nan"), "", "F32", "BF16", "\ud800", "x" * 3000),
    *([], {}, [[]], [0], [1, 0], [-5, 3], [0, 2**70], {"a": 1}, [1, 2, 3]),
)
NAMES = ("", "\ud800", "a" * 1000, "__metadata__", "\0", "../../etc")


@pytest.fixture(scope="module")
def folder(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model without its weights."""
    made = tmp_path_factory.mktemp("hostile")
    for file in demo.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, made)
    return made


@pytest.fixture(scope="module")
def sound(demo: Path) -> tuple[dict[str, Any], int]:
    """The demo's header, and the bytes after it."""
    raw = (demo / "model.safetensors").read_bytes()
    [length] = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), len(raw) - 8 - length


def mutated(sound: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(json.dumps(sound))
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(list(header))
        entry = header[key] if isinstance(header[key], dict) else {}
        span, shape = entry.get("data_offsets"), entry.get("shape")
        match rng.randrange(6):
            case 0:
                header[key] = rng.choice(VALUES)
            case 1 if entry:
                entry[rng.choice(("dtype", "shape", "data_offsets", "more"))] = rng.choice(VALUES)
            case 2:
                header[rng.choice(NAMES)] = rng.choice((header[key], *VALUES))
            case 3:
                del header[key]
            case 4 if isinstance(span, list) and len(span) == 2:
                at, end = span
                entry["data_offsets"] = rng.choice(([end, at], [at - 4, end], [0, end], [at + 4, end], [at, 10**4299]))
            case _ if isinstance(shape, list):
                entry["shape"] = rng.choice((shape[::-1], [*shape, 1], [0], [], [2**40, 2**40], [-1]))
        if not header:
            return header
    return header


def write(folder: Path, text: bytes, data_bytes: int) -> Path:
    """A file of that header, and zeros that take no room on the disk."""
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + data_bytes)
    return file


def is_readable(file: Path) -> bool:
    """To the library."""
    try:
        with safe_open(file, framework="np"):
            return True
    except SafetensorError:
        return False


@pytest.mark.slow
def test_many_headers(folder: Path, sound: tuple[dict[str, Any], int]) -> None:
    header, data_bytes = sound
    refused = 0
    for seed in range(HEADERS):
        rng = random.Random(seed)
        text = bytearray(json.dumps(mutated(header, rng)).encode())
        if rng.random() < 0.1:
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        file = write(folder, bytes(text), data_bytes)
        try:
            open_source(folder)
        except ODMoEError:
            refused += 1
        else:
            assert is_readable(file), seed
    assert refused > HEADERS / 2


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": []},
        {"dtype": {"a": 1}},
        {"dtype": "F31"},
        {"shape": [1]},
        {"data_offsets": [8, 4]},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [4, 8]},
    ],
)
def test_an_entry_that_no_tensor_can_have(change: dict[str, Any], folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write(folder, json.dumps({"a": entry | change}).encode(), 8)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        open_source(folder)
