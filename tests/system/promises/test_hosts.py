"""What becomes wrong on a host while it serves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.system


@pytest.mark.parametrize("damage", ["bits", "cut", "removed"])
def test_a_store_is_damaged_on_one_host(damage: str, nodes: Any, answer: Any, tmp_path: Path) -> None:
    """In the middle of an answer. What that host loads from then on is not used."""
    shutil.copytree(nodes.store.path, tmp_path / "store")
    own = nodes.node("worker", 1, tmp_path / "store", loader="disk")
    nodes.later(own.close)
    sound = nodes.workers[1]
    nodes.later(lambda: nodes.workers.__setitem__(1, sound))
    nodes.workers[1] = own
    cluster = nodes.cluster(audit=0)

    def act() -> None:
        for file in (tmp_path / "store").rglob("layer*"):
            content = file.read_bytes()
            if damage == "removed":
                file.unlink()
            else:
                with file.open("r+b") as held:
                    held.truncate(len(content) // 3)
                    if damage == "bits":
                        held.seek(0)
                        held.write(bytes(byte ^ 16 for byte in content))

    nodes.check_same(answer(cluster, {5: act}))
