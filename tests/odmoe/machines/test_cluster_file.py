"""Cluster files: who is what, and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from odmoe.machines.cluster_file import OBEYED, read_cluster_file
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from support.paths import ROOT


def write(path: Path, hosts: Any, **changed: Any) -> Path:
    content = {
        "cluster_name": "c",
        "provider": {"type": "external", "hosts": hosts},
        "auth": {"ssh_user": "me", "ssh_private_key": "~/.ssh/x"},
    } | changed
    file = path / "cluster.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_the_project_s_own_file_has_ten_hosts() -> None:
    cluster = read_cluster_file(ROOT / "cluster.yaml")
    assert [host.name for host in cluster.hosts] == ["main", "shadow", *(f"worker-{n}" for n in range(8))]
    assert [host.address for host in cluster.hosts] == [f"10.77.0.{n}" for n in range(11, 21)]
    assert [host.group for host in cluster.hosts_of("worker_node")] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cluster.main.address == "10.77.0.11"
    assert cluster.find("worker-3") is cluster.find("10.77.0.16") is cluster.hosts[5]


def test_without_shadow_and_groups(tmp_path: Path) -> None:
    hosts = {"main_node": "10.0.0.1", "worker_node": ["10.0.0.3", {"host": "10.0.0.2", "slots": 2, "loader": "cuda"}]}
    cluster = read_cluster_file(write(tmp_path, hosts))
    assert [(host.name, host.group) for host in cluster.hosts] == [
        ("main", None),
        ("worker-0", None),
        ("worker-1", None),
    ]
    assert cluster.hosts[2].settings == {"slots": 2, "loader": "cuda"}
    assert cluster.key == Path.home() / ".ssh/x"


WORKER = {"worker_node": ["10.0.0.2"]}


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({"main_node": "10.0.0.1"}, "worker_node is None; allowed: a list of at least one host"),
        ({"main_node": "10.0.0.1", "worker_node": []}, "worker_node is \\[\\]"),
        ({**WORKER, "main_node": "10.0.0.2"}, "10.0.0.2 is both main and worker-0"),
        ({**WORKER, "main_node": "somewhere"}, "main_node is 'somewhere'; allowed: an IPv4 address"),
        (WORKER, "main_node is None; allowed: an IPv4 address"),
        ({**WORKER, "main_node": "10.0.0.1", "boss": "10.0.0.9"}, "the role 'boss'; allowed: main_node, shadow_node"),
        ({**WORKER, "main_node": {"host": "10.0.0.1", "slot": 2}}, "the setting 'slot'; allowed for one host: slots"),
        (
            {"main_node": "10.0.0.1", "worker_node": [[]]},
            "worker_node is \\[\\[\\]\\]; allowed: a list of at least one host",
        ),
        ({**WORKER, "main_node": 10}, "main_node is 10; allowed: an IPv4 address"),
        ({**WORKER, "main_node": {"host": "10.0.0.1", "slots": "many"}}, "slots of 10.0.0.1 is 'many'; allowed: 1, 2"),
        (
            {**WORKER, "main_node": {"host": "10.0.0.1", "loader": "tape"}},
            "loader of 10.0.0.1 is 'tape'; allowed: disk",
        ),
        (["10.0.0.1"], "hosts is \\['10.0.0.1'\\]; allowed: a block"),
    ],
)
def test_hosts_that_cannot_be(tmp_path: Path, hosts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster_file(write(tmp_path, hosts))


def test_a_host_has_a_device_of_its_own(tmp_path: Path) -> None:
    """It is that of its role, and so comes before the device of all hosts."""
    hosts = {
        "main_node": {"host": "10.0.0.1", "device": "cuda:1"},
        "shadow_node": {"host": "10.0.0.2", "device": "cpu"},
        "worker_node": [{"host": "10.0.0.3", "device": "cuda"}, "10.0.0.4"],
    }
    found = read_cluster_file(write(tmp_path, hosts)).hosts
    assert [host.settings for host in found] == [
        {"main_device": "cuda:1"},
        {"shadow_device": "cpu"},
        {"worker_device": "cuda"},
        {},
    ]
    every = Settings(model="m", worker_device="cpu", main_device="cpu", shadow_device="cuda")
    main, shadow, worker, other = (every.replace(**host.settings) for host in found)
    assert main.device_of("main") == "cuda:1"
    assert shadow.device_of("shadow") == "cpu"
    assert (worker.device_of("worker"), worker.loader_used) == ("cuda", "cuda")
    assert other.device_of("worker") == "cpu"


def test_a_shadows_layers_may_be_shared_by_devices(tmp_path: Path) -> None:
    shadow = {"host": "10.0.0.2", "device": ["cuda:0", "cuda:1"]}
    hosts = {"main_node": "10.0.0.1", "shadow_node": shadow, "worker_node": ["10.0.0.3"]}
    found = read_cluster_file(write(tmp_path, hosts)).hosts[1]
    assert Settings(model="m").replace(**found.settings).shadow_device == "cuda:0,cuda:1"


def test_a_shadows_layers_may_be_shared_by_hosts(tmp_path: Path) -> None:
    hosts = {"main_node": "10.0.0.1", "shadow_node": ["10.0.0.8", {"host": "10.0.0.9", "device": "cuda"}], **WORKER}
    found = read_cluster_file(write(tmp_path, hosts)).hosts_of("shadow_node")
    assert [(host.name, host.number, host.address) for host in found] == [
        ("shadow", 0, "10.0.0.8"),
        ("shadow-1", 1, "10.0.0.9"),
    ]
    assert found[1].settings == {"shadow_device": "cuda"}
    with pytest.raises(ConfigError, match="shadow_node has 0 hosts; allowed: 1 to 16, or no list"):
        read_cluster_file(write(tmp_path, hosts | {"shadow_node": []}))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"device": ["cuda:0", "cuda:1"]}, "device of 10.0.0.3 is \\['cuda:0', 'cuda:1'\\]; allowed: auto, cpu, cuda"),
        ({"device": "GPU"}, "device of 10.0.0.3 is 'GPU'; allowed: auto, cpu, cuda"),
        ({"device": "cpu", "loader": "cuda"}, "device of 10.0.0.3 is cpu with .*loader of 10.0.0.3 cuda"),
        ({"device": "mps"}, "device of 10.0.0.3 is 'mps'; allowed: auto, cpu, cuda, cuda:1"),
    ],
)
def test_a_hosts_device_that_cannot_be_is_named(tmp_path: Path, own: dict[str, str], message: str) -> None:
    hosts = {"main_node": "10.0.0.1", "worker_node": [{"host": "10.0.0.3", **own}]}
    with pytest.raises(ConfigError, match=message):
        read_cluster_file(write(tmp_path, hosts))


def test_files_that_are_none(tmp_path: Path) -> None:
    hosts = {"main_node": "10.0.0.1", **WORKER}
    with pytest.raises(ConfigError, match=r"is not there; the project's cluster\.yaml is an example"):
        read_cluster_file(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml cannot be read"):
        read_cluster_file(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="cluster_name is missing"):
        read_cluster_file(write(tmp_path, hosts, cluster_name=None))
    with pytest.raises(ConfigError, match="ssh_user is 3"):
        read_cluster_file(write(tmp_path, hosts, auth={"ssh_user": 3}))


GOOD = """
cluster_name: c
provider:
  type: external
  hosts: {main_node: 10.0.0.1, worker_node: [10.0.0.2]}
auth: {ssh_user: me}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the cluster file .*c\.yaml is empty; the project's cluster\.yaml is an example"),
        ("# nothing\n", r"c\.yaml is empty"),
        ("- 1", r"c\.yaml is a list; allowed: blocks such as provider:"),
        ("[" * 100_000, r"c\.yaml is nested more than 32 deep in line 1"),
        (GOOD + "auth: {ssh_user: you}\n", r"c\.yaml has auth twice, in lines 6 and 7; keep one"),
        (GOOD.replace("10.0.0.2]", "10.0.0.2], main_node: 10.0.0.3"), r"has main_node twice, in lines 5 and 5"),
        (GOOD + "head_setup_comands: []\n", r"head_setup_comands is not a key .*; did you mean head_setup_commands"),
        (GOOD.replace("ssh_user: me", "ssh_user: me, ssh_privat_key: x"), r"auth: ssh_privat_key .*ssh_private_key"),
        (GOOD.replace("hosts:", "host:"), r"provider: host is not a key of a cluster file; did you mean hosts"),
        (GOOD.replace("auth: {ssh_user: me}", ""), r"auth is missing"),
    ],
)
def test_files_that_say_nothing_or_too_much(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster_file(file)
    file.write_text(GOOD)
    assert read_cluster_file(file).main.address == "10.0.0.1"


def keys_of(schema: dict[str, Any], where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, about in schema.get("properties", {}).items():
        yield where + name, about
        yield from keys_of(about, f"{where}{name}.")


(_ray,) = (find_spec("ray") or ModuleSpec("ray", None)).submodule_search_locations or ["not installed"]
RAY = json.loads((Path(_ray) / "autoscaler" / "ray-schema.json").read_text())
EXAMPLES = {"string": "x", "object": {"x": "y"}, "array": ["x"], "integer": 1000, "number": 5, "boolean": True}


@pytest.mark.parametrize(
    ("key", "about"), list(keys_of(RAY)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_key_of_ray_is_obeyed_or_refused(key: str, about: dict[str, Any], tmp_path: Path) -> None:
    """By its name, and with its line."""
    kind = about.get("type") or ("array" if key.endswith("commands") else "boolean")
    content = yaml.safe_load(GOOD)
    *blocks, name = key.split(".")
    part = content
    for block in blocks:
        part = part.setdefault(block, {})
    part.setdefault(name, EXAMPLES[kind if isinstance(kind, str) else kind[0]])
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(content))
    if key in (*OBEYED, "provider.hosts") and not key.startswith("provider.module"):
        assert read_cluster_file(file).main.address == "10.0.0.1"
        return
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(file)
    refused = ": ".join(part for part in key.split(".")[: 1 if key.startswith("docker") else None])
    if key.startswith("provider.security_group") or key.startswith("provider.gcp_credentials"):
        refused = ": ".join(key.split(".")[:2])
    assert f": {refused} " in str(caught.value)
    named = refused.split(": ")[-1]
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.strip().startswith(f"{named}:"))
    assert f"c.yaml, line {line}: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("docker: {image: x}", "c.yaml, line 7: docker has no effect here: nodes run on the hosts themselves"),
        ("max_workers: 0", "c.yaml, line 7: max_workers is 0; allowed: 1 or more"),
        ("setup_commands: make", "line 7: setup_commands is 'make'; allowed: a list of texts"),
        ("setup_commands: [make, {a: b}]", "line 7: setup_commands has {'a': 'b'}; allowed: a list of texts"),
        ("rsync_exclude: [1]", "line 7: rsync_exclude has 1; allowed: a list of texts"),
        ("file_mounts: [x]", "line 7: file_mounts is ['x']; allowed: a block of settings"),
        ("file_mounts_sync_continuously: 1", "line 7: file_mounts_sync_continuously is 1; allowed: true or false"),
        ("idle_timeout_minutes: yes", "line 7: idle_timeout_minutes is True; allowed: a number"),
        ("7: x", "line 7: 7 is not a key of a cluster file; allowed: cluster_name"),
        ("~: x", "None is not a key of a cluster file"),
        ("k" * 120 + ": x", "line 7: " + "k" * 40 + "... is not a key of a cluster file; allowed:"),
    ],
)
def test_keys_without_effect_and_values_of_another_kind(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{GOOD}{text}\n")
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(file)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


@pytest.mark.parametrize("provider", [{"type": "local"}, {"type": "aws"}, {"module": "other.Provider"}])
def test_another_provider(provider: dict[str, str], tmp_path: Path) -> None:
    """It would not read the hosts."""
    content = yaml.safe_load(GOOD)
    content["provider"] |= provider
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"line \d+: provider: (type|module) is '.*'; allowed: "):
        read_cluster_file(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (0, r"line \d+: replicas is 0; allowed: 1 to 2, the number of workers"),
        (3, r"replicas is 3; allowed: 1 to 2"),
        ("two", r"replicas is 'two'; allowed: a number"),
    ],
)
def test_replicas_are_as_many_as_workers_at_most(replicas: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"main_node": "10.0.0.1", "worker_node": ["10.0.0.2", "10.0.0.3"]})
    assert read_cluster_file(file).replicas is None
    content = yaml.safe_load(file.read_text())
    content["provider"]["replicas"] = 2
    file.write_text(yaml.safe_dump(content))
    assert read_cluster_file(file).replicas == 2
    content["provider"]["replicas"] = replicas
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=message):
        read_cluster_file(file)


def test_a_key_that_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD.replace("me}", "me, ssh_proxy_command: }") + "docker: {}\nno_restart: \n")
    assert read_cluster_file(tmp_path / "c.yaml").user == "me"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cluster_name": "../c"}, "cluster_name is '../c'; allowed: letters"),
        ({"cluster_name": ".."}, "cluster_name is '..'; allowed: letters"),
        ({"cluster_name": "a b"}, "cluster_name is 'a b'; allowed: letters"),
        ({"auth": {"ssh_user": "-oProxyCommand=x"}}, "ssh_user is '-oProxyCommand=x'; allowed: letters"),
        ({"auth": {"ssh_user": "me", "ssh_private_key": 5}}, "ssh_private_key is 5; allowed: a path"),
    ],
)
def test_names_that_would_lead_elsewhere(tmp_path: Path, changed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster_file(write(tmp_path, {"main_node": "10.0.0.1", **WORKER}, **changed))


def test_an_unknown_host(tmp_path: Path) -> None:
    cluster = read_cluster_file(write(tmp_path, {"main_node": "10.0.0.1", **WORKER}))
    with pytest.raises(ConfigError, match=r"'worker-1' is no host of .*; there are: main, worker-0"):
        cluster.find("worker-1")
