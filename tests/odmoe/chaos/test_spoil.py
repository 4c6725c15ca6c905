"""What is spoilt on a host is as before once it is over, whatever becomes of who began it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.held import HELD, held_text
from checkpoint.store import ExpertStore
from odmoe.chaos.spoil import FROZEN, LINK, SLOW, STORE, damaged, during, may_cut, spoil
from scheduler.errors import CorruptStoreError
from scheduler.types import ExpertId

pytestmark = pytest.mark.slow
ADDRESS = "203.0.113.9"  # of RFC 5737: nobody's
END_S = 60.0


def until(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + END_S
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def store(demo_store: Any, tmp_path: Path) -> ExpertStore:
    return ExpertStore.open(Path(shutil.copytree(demo_store("float32").path, tmp_path / "store")))


def contents(store: ExpertStore) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in store.path.glob("layer*")}


def changed(store: ExpertStore, files: dict[Path, bytes]) -> int:
    """How many bytes are not as before."""
    now = contents(store)
    return sum(one != other for file, before in files.items() for one, other in zip(now[file], before, strict=True))


def test_a_store(store: ExpertStore) -> None:
    """Each expert fails its checksum meanwhile."""
    files = contents(store)
    spoil(STORE, 3.0, [str(store.path)])
    until(lambda: any(file.read_bytes() != before for file, before in files.items()))
    until(lambda: all(file.read_bytes() == before for file, before in files.items()))
    store.verify()
    with damaged(store.path):
        assert changed(store, files) == len(store.manifest.moe_layers) * store.manifest.experts
        with pytest.raises(CorruptStoreError):
            store.verify()


def test_of_a_part_of_a_store_what_it_holds(store: ExpertStore) -> None:
    layer, files = store.manifest.moe_layers[0], contents(store)
    (store.path / HELD).write_text(held_text([ExpertId(layer, 0), ExpertId(layer, 2)]))
    part = ExpertStore.open(store.path)
    with damaged(store.path):
        assert changed(store, files) == 2
        assert all(
            (store.path / file).read_bytes()[blob.offset] != files[store.path / file][blob.offset]
            for file, blob in (part.locate(*expert) for expert, _ in part.experts())
        )
    assert changed(store, files) == 0


def test_a_store_whose_last_file_is_gone_is_left_as_it_was(store: ExpertStore) -> None:
    (store.path / store.manifest.layers[store.manifest.moe_layers[-1]].file).unlink()
    files = contents(store)
    with pytest.raises(FileNotFoundError), damaged(store.path):
        pass
    assert files
    assert changed(store, files) == 0


def test_without_the_right_to_change_routes_no_link_is_cut() -> None:
    asked = [sys.executable, "-c", "from odmoe.chaos.spoil import may_cut; print(may_cut())"]
    command = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", *asked]
    told = subprocess.run(command, capture_output=True, text=True, timeout=END_S)
    if told.returncode:
        pytest.skip(f"rights cannot be dropped here: {told.stderr}")
    assert told.stdout == "False\n"


def test_a_link() -> None:
    if not may_cut():
        pytest.skip("needs the right to change routes")

    def routes() -> list[str]:
        said = subprocess.run(["ip", "-json", "route"], capture_output=True, text=True, timeout=10, check=True).stdout
        return [route["dst"] for route in json.loads(said) if route.get("type") == "blackhole"]

    spoil(LINK, 3.0, [ADDRESS])
    until(lambda: ADDRESS in routes())
    until(lambda: ADDRESS not in routes())


@pytest.mark.parametrize("what", [FROZEN, SLOW])
def test_a_process_that_may_end_meanwhile(what: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:

        def stands() -> bool:
            return Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"

        spoil(what, 2.0, [str(process.pid)])
        until(stands)
        until(lambda: not stands())
        time.sleep(1.0 + 2.0)
        assert not stands()
        process.kill()
    during(what, str(process.pid), 0.1)
