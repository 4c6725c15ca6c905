"""`odmoe doctor` on this machine: what it prints, and its exit code."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from odmoe.doctor import examination
from odmoe.doctor.doctor import stores_here
from odmoe.doctor.table import CHECKS
from odmoe.stores import prepare_store
from scheduler.errors import HostError
from support.machines.cli import CommandLine, check_one_line
from support.machines.ssh_hosts import write_cluster_file
from support.models.tiny_mixtral import save_tiny_mixtral
from support.paths import DEMO, ROOT


def silent(*_: Any) -> Any:
    raise HostError("facts took longer than 30 s")


def test_a_machine_that_answers_nothing_is_told_check_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "ask_here", silent)
    done = CommandLine()("doctor", "-m", str(DEMO))
    assert (done.code, done.err) == (0, "")
    assert "  -        memory       not checked: facts took longer than 30 s\n" in done.out
    assert "ok       Python" in done.out
    found = json.loads(CommandLine()("doctor", "--json").out)
    assert found["counts"]["not checked"] > 8
    assert {one["state"] for one in found["checks"]} == {"ok", "not checked"}


@pytest.mark.slow
def test_this_machine_as_json_and_as_text() -> None:
    """The table of docs/reports.md has these fields."""
    done = CommandLine()("doctor", "-m", str(DEMO), "--json")
    found = json.loads(done.out)
    assert done.code == (0 if found["ok"] else 1)
    assert set(found) == {"ok", "cluster", "needs", "counts", "checks"}
    assert sum(found["counts"].values()) == len(found["checks"])
    assert all(set(one) == {"name", "host", "state", "value", "cure"} for one in found["checks"])
    states = {one["name"]: one["state"] for one in found["checks"]}
    assert states.keys() <= {check.name for check in CHECKS}
    assert states["Python"] == states["packages"] == states["kernel"] == "ok"
    text = (ROOT / "docs" / "reports.md").read_text().partition("## odmoe doctor")[2]
    assert all(re.search(rf"`{name}`", text) for name in (*found, *found["checks"][0], *found["needs"]))


@pytest.mark.slow
def test_a_byte_that_differs_is_found_by_deep_alone(tmp_path: Path) -> None:
    sound = prepare_store(str(save_tiny_mixtral(tmp_path / "model")), str(tmp_path / "stores" / "sound"), None).path
    damaged = sound.with_name("damaged")
    shutil.copytree(sound, damaged)
    layer = next(damaged.glob("layer-*"))
    content = layer.read_bytes()
    layer.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    stores = stores_here(sound.parent, "")
    assert [found["fault"] for found in stores.values()] == [None, None]
    found = examination.verify_all(stores, lambda *_: None)["verified"]
    assert found["sound"] == ""
    assert layer.name in found["damaged"]


def test_a_cluster_file_whose_ssh_key_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "ask_here", silent)
    cluster = write_cluster_file(tmp_path, ("127.0.99.1", "127.0.99.2", "127.0.99.3"), tmp_path / "no-key")
    done = CommandLine()("doctor", str(cluster.path), "--json")
    found = json.loads(done.out)
    assert (done.code, done.err, found["cluster"]) == (1, "", "odmoe-test")
    assert found["checks"][-1]["state"] == "failure"
    assert found["checks"][-1]["cure"] == f"make one: ssh-keygen -t ed25519 -N '' -f {tmp_path / 'no-key'}"


def test_wrong_arguments() -> None:
    check_one_line(CommandLine()("doctor", "no.yaml"), 2, "ConfigError", ["no.yaml"])
    check_one_line(CommandLine()("doctor", "--shadow", "int9"), 2, "ConfigError", ["int9", "nf4"])
    check_one_line(CommandLine()("doctor", "-m", "no-model"), 1, "MissingShardError", ["no-model"])
