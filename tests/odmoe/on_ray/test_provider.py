"""Our node provider, as Ray's launcher and autoscaler use it; no ssh, and no Ray is started."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler import tags
from ray.autoscaler._private.commands import _bootstrap_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

from odmoe.on_ray import provider as module
from odmoe.on_ray.provider import OnPremises, cluster_dir, complete, parse_hosts
from scheduler.errors import ConfigError
from support.paths import ROOT


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written outside `tmp_path`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """The project's cluster file, with a key that is there."""
    content = dict(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    key = tmp_path / "key"
    key.write_text("not a key")
    content["auth"]["ssh_private_key"] = str(key)
    return content


def test_ray_takes_the_project_s_file(content: dict[str, Any]) -> None:
    """Ray's own check and defaults; then a node type for each role and group, which are all to be there."""
    config = _bootstrap_config(content, no_config_cache=True)
    types = config["available_node_types"]
    assert config["head_node_type"] == "main_node"
    assert {name: (kind["min_workers"], kind["labels"]) for name, kind in types.items()} == {
        "main_node": (0, {"role": "main_node"}),
        "shadow_node": (1, {"role": "shadow_node"}),
        **{f"worker_node_{n}": (2, {"role": "worker_node", "group": str(n)}) for n in range(4)},
    }
    assert types["worker_node_1"]["resources"] == {"worker_node": 1, "CPU": 0}
    assert types["worker_node_1"]["node_config"] == {"hosts": ["10.77.0.15", "10.77.0.16"]}
    assert config["max_workers"] == 9
    mounts = {remote: Path(local).name for remote, local in config["file_mounts"].items()}
    assert mounts == {"~/odmoe/code.tar.gz": "code.tar.gz", "~/odmoe/keys/ray_token": "ray_token"}
    token = Path(config["file_mounts"]["~/odmoe/keys/ray_token"])
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    json.dumps(config)  # as it goes to the head


def test_what_the_head_is_given_is_taken_by_its_autoscaler(content: dict[str, Any]) -> None:
    config = _bootstrap_config(content, no_config_cache=True)
    remote = OnPremises(config["provider"], "c").prepare_for_head_node(config)
    assert remote["provider"]["ssh"]["key"] == "~/ray_bootstrap_key.pem"
    read = AutoscalingConfig(remote, skip_content_hash=True)
    kinds = read.get_node_type_configs()
    assert sum(kind.min_worker_nodes for kind in kinds.values()) == 9
    assert kinds["worker_node_3"].labels == {"role": "worker_node", "group": "3"}


def test_bad_hosts_end_the_launch(content: dict[str, Any]) -> None:
    content["provider"]["hosts"]["worker_node"].append(["10.77.0.11"])
    with pytest.raises(SystemExit, match=r"ConfigError: .*10\.77\.0\.11 is both main and worker-8"):
        _bootstrap_config(content, no_config_cache=True)
    with pytest.raises(ConfigError, match=r"provider\.hosts is None"):
        parse_hosts({})


def test_nodes_come_and_go(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the head: it knows itself, gives out the hosts of a type, and stops those that end."""
    config = complete(content)
    provider = OnPremises({**config["provider"], "on_head": True}, "c")
    assert provider.non_terminated_nodes({}) == ["10.77.0.11"]
    assert provider.node_tags("10.77.0.11")[tags.TAG_RAY_USER_NODE_TYPE] == "main_node"
    group = config["available_node_types"]["worker_node_1"]["node_config"]
    named = {tags.TAG_RAY_NODE_KIND: "worker", tags.TAG_RAY_USER_NODE_TYPE: "worker_node_1"}
    provider.create_node(group, named, 1)
    assert provider.non_terminated_nodes(named) == ["10.77.0.15"]
    provider.create_node(group, named, 5)
    assert provider.non_terminated_nodes(named) == ["10.77.0.15", "10.77.0.16"]
    assert provider.is_running("10.77.0.16")
    stopped = []

    def run(command: list[str], **how: Any) -> None:
        stopped.append(next(word for word in command if "@" in word))
        assert how["timeout"] > 0
        if "10.77.0.16" in stopped[-1]:
            raise subprocess.TimeoutExpired(command, how["timeout"])

    monkeypatch.setattr(module.subprocess, "run", run)
    provider.terminate_nodes(["10.77.0.15", "10.77.0.16"])
    assert sorted(stopped) == ["root@10.77.0.15", "root@10.77.0.16"]
    assert provider.non_terminated_nodes(named) == []
    taken = threading.Thread(target=provider.create_node, args=(group, named, 1))  # again
    taken.start()
    for _ in range(2):  # but not before the autoscaler has seen that it was gone
        taken.join(0.1)
        assert taken.is_alive()
        assert provider.non_terminated_nodes({}) == ["10.77.0.11"]
    taken.join(60)
    assert provider.non_terminated_nodes(named) == ["10.77.0.15"]
    again = OnPremises({**config["provider"], "on_head": True}, "c")  # what it knows outlives it
    assert again.non_terminated_nodes(named) == ["10.77.0.15"]


def test_ray_down_stops_every_host(content: dict[str, Any]) -> None:
    """The launching machine never saw the workers being made."""
    provider = OnPremises(complete(content)["provider"], "c")
    assert len(provider.nodes_for_teardown({})) == 10
    assert Path(cluster_dir("c") / "code.tar.gz").is_file()
