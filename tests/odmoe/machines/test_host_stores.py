"""`odmoe host-stores` lists and removes; the hosts' script runs here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odmoe.machines import host_stores as module
from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.home import cluster_dir, cluster_id, write_token
from odmoe.machines.owners.claims import Claims
from scheduler.errors import ConfigError, LaunchError
from support.machines.local_hosts import LocalSsh, local_cluster

ADDRESSES = ("127.0.9.1", "127.0.9.2", "127.0.9.3")


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalSsh:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(module.Ssh, "for_cluster", lambda *_: LocalSsh(tmp_path))
    return LocalSsh(tmp_path)


@pytest.fixture
def lab(tmp_path: Path, ssh: LocalSsh) -> ClusterFile:
    cluster = local_cluster(tmp_path / "lab", ssh, ADDRESSES, "lab")
    (tmp_path / "lab" / "key").touch()
    for number, address in enumerate(ADDRESSES):
        for name in ("old", "new")[: number + 1]:
            folder = ssh.home(address) / "odmoe" / "stores" / name
            (folder / "dense").mkdir(parents=True)
            (folder / "layer").write_bytes(bytes(1_500_000))
            (folder / "dense" / "config.json").write_bytes(bytes(100))
            (folder / "manifest.json").touch()
    return cluster


def test_stores_are_listed_with_sizes(lab: ClusterFile, ssh: LocalSsh, capsys: pytest.CaptureFixture[str]) -> None:
    (ssh.home("127.0.9.1") / "odmoe" / "stores" / "old" / "manifest.json").unlink()
    module.list_stores(lab.path)
    head, *lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert head[:3] == ["host", "address", "store"]
    assert [line[:3] for line in lines] == [
        ["main", "127.0.9.1", "old"],
        ["shadow", "127.0.9.2", "new"],
        ["shadow", "127.0.9.2", "old"],
        ["worker-0", "127.0.9.3", "new"],
        ["worker-0", "127.0.9.3", "old"],
    ]
    assert lines[0][3] == "1.5 MB  unfinished; not in use"
    module.list_stores(lab.path, as_json=True)
    assert json.loads(capsys.readouterr().out)["worker-0"]["new"] == {"bytes": 1_500_100, "whole": True, "used": ""}


def test_a_store_in_use_stays(lab: ClusterFile, ssh: LocalSsh, capsys: pytest.CaptureFixture[str]) -> None:
    write_token(cluster_dir("lab"))
    Claims(lab, str(cluster_id(cluster_dir("lab")))).make(ssh, "new", take_over=False)
    with pytest.raises(LaunchError, match="not every store was removed"):
        module.remove_stores(lab.path, ["new", "old"])
    said = capsys.readouterr()
    assert said.out.count("removed old, 1.5 MB") == 3
    assert said.err.count("new stays: its odmoe up is at work") == 2
    for address in ADDRESSES[1:]:
        assert [path.name for path in (ssh.home(address) / "odmoe" / "stores").iterdir()] == ["new"]


def test_another_cluster_s_hosts_keep_theirs(lab: ClusterFile, ssh: LocalSsh) -> None:
    Claims(lab, "another").make(ssh, "new", take_over=False)
    with pytest.raises(LaunchError, match="not every store"):
        module.remove_stores(lab.path, ["old"])
    assert (ssh.home("127.0.9.1") / "odmoe" / "stores" / "old" / "layer").exists()


def test_names_that_are_none(lab: ClusterFile, ssh: LocalSsh) -> None:
    for name in ("..", "", "a/b", "/", "."):
        with pytest.raises(ConfigError, match="allowed: a store's name"):
            module.remove_stores(lab.path, [name])
    with pytest.raises(LaunchError, match="no host has the store none"):
        module.remove_stores(lab.path, ["none"])
