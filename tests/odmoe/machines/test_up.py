"""What `odmoe up` knows before it reaches a host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odmoe.clusters.configuration import configure
from odmoe.machines import up as module
from odmoe.machines.up import up
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError
from support.paths import ROOT


@pytest.mark.parametrize(("given", "slots"), [({}, 8), ({"slots": 9}, 9)])
def test_a_cluster_file_has_the_number_of_workers(
    given: dict[str, Any], slots: int, demo_store: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """fully-cached needs a slot for each of the demo model's 64 experts; the project's own file has eight workers."""
    started: list[Settings] = []
    store = demo_store("float32")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "odmoe").touch()
    monkeypatch.setattr(module, "store_of", lambda *_: store)
    monkeypatch.setattr(module, "_check_model", lambda *_: None)
    monkeypatch.setattr(module.Claims, "settle", lambda *_: None)
    steps = ("_make_keys", "_claim", "_push_keys", "_push_store", "_ray")
    for name, answer in (("_fit", {}), ("_check_hosts", {}), *((step, None) for step in steps)):
        monkeypatch.setattr(module._BringUp, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(module._BringUp, "_nodes", lambda self, *_: started.append(self._settings))
    file = ROOT / "cluster.yaml"
    up(file, Settings(model="demo", cluster=str(file), system="fully-cached", **given), Terminal(quiet=True))
    assert configure(started[0], store).resources.slots == slots


def test_a_cluster_file_with_fewer_hosts_than_parts_of_the_shadow() -> None:
    file = ROOT / "cluster.yaml"
    with pytest.raises(ConfigError, match=r"--shadow-hosts is 3, but .*cluster.yaml lists 1 as shadow_node"):
        up(file, Settings(model="demo", cluster=str(file), shadow_hosts=3), Terminal(quiet=True))
