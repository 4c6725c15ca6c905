"""What is spoilt on a host is as before once it is over, whatever becomes of who began it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odmoe.chaos.spoil import LINK, STORE, flip, may_cut, spoil
from scheduler.errors import CorruptStoreError

pytestmark = pytest.mark.slow
ADDRESS = "203.0.113.9"  # of RFC 5737: nobody's
END_S = 60.0


def until(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + END_S
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_store(demo_store: Any, tmp_path: Path) -> None:
    """Each expert fails its checksum meanwhile."""
    store = type(demo_store("float32")).open(Path(shutil.copytree(demo_store("float32").path, tmp_path / "store")))
    files = {file: file.read_bytes() for file in store.path.glob("layer*")}
    spoil(STORE, str(store.path), 3.0)
    until(lambda: any(file.read_bytes() != before for file, before in files.items()))
    until(lambda: all(file.read_bytes() == before for file, before in files.items()))
    store.verify()
    flip(store.path)
    changed = sum(
        one != other for file, before in files.items() for one, other in zip(file.read_bytes(), before, strict=True)
    )
    assert changed == len(store.manifest.moe_layers) * store.manifest.experts
    with pytest.raises(CorruptStoreError):
        store.verify()


@pytest.mark.skipif(not may_cut(), reason="needs root and ip")
def test_a_link() -> None:
    def routes() -> list[str]:
        said = subprocess.run(["ip", "-json", "route"], capture_output=True, text=True, timeout=10, check=True).stdout
        return [route["dst"] for route in json.loads(said) if route.get("type") == "blackhole"]

    spoil(LINK, ADDRESS, 3.0)
    until(lambda: ADDRESS in routes())
    until(lambda: ADDRESS not in routes())
