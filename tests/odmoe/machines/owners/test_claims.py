"""A host belongs to one cluster at a time, and says to which. The hosts' script runs here, in a home for each host."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.owners import claims as module
from odmoe.machines.owners.claims import Claims, check_owner_command
from odmoe.machines.owners.ownership import describe_owner, faults, other_owner, same_machine
from odmoe.machines.preflight import probe, stop_processes
from scheduler.errors import HostError
from support.machines.local_hosts import LocalSsh

LAB, OFFICE = "1ab0000000000000", "0ff1ce0000000000"


def owner(ssh: LocalSsh, address: str) -> dict[str, Any]:
    return dict(json.loads((ssh.home(address) / "odmoe" / "owner.json").read_text()))


def change_owner(ssh: LocalSsh, cluster: ClusterFile, **changes: Any) -> None:
    for host in cluster.hosts:
        path = ssh.home(host.address) / "odmoe" / "owner.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_host_says_whose_it_is(ssh: LocalSsh, lab: ClusterFile) -> None:
    claims = Claims(lab, LAB)
    assert claims.make(ssh, "mixtral", take_over=False) == ({}, {})
    found = owner(ssh, "127.0.9.2")
    assert (found["id"], found["cluster"], found["file"]) == (LAB, "lab", str(lab.path))
    assert (found["launcher"], found["head"], found["launching"]) == (module.launcher(), "127.0.9.1:6379", True)
    claims.settle(ssh, "mixtral")
    assert owner(ssh, "127.0.9.2") == found | {"launching": False}
    facts = probe(ssh, lab.hosts[1])
    assert other_owner(facts, LAB) is None
    text = describe_owner(other_owner(facts, OFFICE) or {})
    assert re.fullmatch(rf"the cluster lab of \S+@\S+ \({lab.path}\), since \d{{4}}-\d\d-\d\d \d\d:\d\d UTC", text)


def test_another_cluster_is_refused_while_anything_runs_or_is_begun(
    ssh: LocalSsh, lab: ClusterFile, office: ClusterFile, start: Any
) -> None:
    lab_claims, office_claims = Claims(lab, LAB), Claims(office, OFFICE)
    lab_claims.make(ssh, "mixtral", take_over=False)
    _, failed = office_claims.make(ssh, "qwen", take_over=False)
    assert len(failed) == 3
    assert "main (127.0.9.1): it belongs to the cluster lab of " in str(failed["127.0.9.1"])
    assert "its odmoe up is at work" in str(failed["127.0.9.1"])
    lab_claims.settle(ssh, "mixtral")
    start("127.0.9.2", "raylet")
    before = {address: owner(ssh, address) for address in ("127.0.9.1", "127.0.9.2", "127.0.9.3")}
    _, failed = office_claims.make(ssh, "qwen", take_over=False)
    assert list(failed) == ["127.0.9.2"]
    assert "(it runs here: raylet)" in str(failed["127.0.9.2"])
    assert {address: owner(ssh, address) for address in before} == before, "all hosts, or none"
    taken, failed = office_claims.make(ssh, "qwen", take_over=True)
    assert (list(taken), failed) == (["127.0.9.1", "127.0.9.2", "127.0.9.3"], {})
    assert taken["127.0.9.2"]["held"] == "it runs here: raylet"
    assert owner(ssh, "127.0.9.2")["cluster"] == "office"


@pytest.mark.slow
def test_a_claim_of_which_nothing_runs_is_taken_and_told(ssh: LocalSsh, lab: ClusterFile, office: ClusterFile) -> None:
    """After a restart of the hosts, for example, when `down` never ran."""
    Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    Claims(lab, LAB).settle(ssh, None)
    taken, failed = Claims(office, OFFICE).make(ssh, "qwen", take_over=False)
    assert failed == {}
    assert {(found["cluster"], found["held"]) for found in taken.values()} == {("lab", "")}


@pytest.mark.slow
def test_an_up_that_was_killed_a_day_ago_holds_nothing(ssh: LocalSsh, lab: ClusterFile, office: ClusterFile) -> None:
    Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    change_owner(ssh, lab, since=owner(ssh, "127.0.9.1")["since"] - 24 * 3600)
    assert Claims(office, OFFICE).make(ssh, "qwen", take_over=False)[1] == {}


@pytest.mark.slow
def test_a_host_whose_cluster_lives_elsewhere_is_held(ssh: LocalSsh, lab: ClusterFile, office: ClusterFile) -> None:
    """It was restarted, and its head is about to start Ray on it again."""
    Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    Claims(lab, LAB).settle(ssh, "mixtral")
    head = grpc.server(ThreadPoolExecutor(1))
    change_owner(ssh, lab, head=f"127.0.0.1:{head.add_insecure_port('127.0.0.1:0')}")
    head.start()
    _, failed = Claims(office, OFFICE).make(ssh, "qwen", take_over=False)
    assert len(failed) == 3
    assert "(its head answers at 127.0.0.1:" in str(failed["127.0.9.1"])
    head.stop(None).wait()
    assert Claims(office, OFFICE).make(ssh, "qwen", take_over=False)[1] == {}


@pytest.mark.slow
def test_what_listens_at_the_port_of_a_head_need_not_be_one(
    ssh: LocalSsh, lab: ClusterFile, office: ClusterFile
) -> None:
    Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    Claims(lab, LAB).settle(ssh, "mixtral")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        change_owner(ssh, lab, head=f"127.0.0.1:{silent.getsockname()[1]}")
        assert Claims(office, OFFICE).make(ssh, "qwen", take_over=False)[1] == {}


def test_of_many_claims_at_once_one_wins(ssh: LocalSsh, lab: ClusterFile) -> None:
    ids = [f"{number:016x}" for number in range(8)]
    won: list[str] = []

    def claim(own: str) -> None:
        try:
            Claims(lab, own)._claim(ssh, lab.hosts[0], "mixtral", False)
            won.append(own)
        except HostError:
            pass

    threads = [threading.Thread(target=claim, args=(own,)) for own in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [owner(ssh, "127.0.9.1")["id"]]


@pytest.mark.slow
def test_a_second_launcher_of_the_same_cluster_waits_for_the_first(
    ssh: LocalSsh, lab: ClusterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines with a copy of the same directory."""
    first = Claims(lab, LAB)
    first.make(ssh, "mixtral", take_over=False)
    assert first.make(ssh, "mixtral", take_over=False) == ({}, {})  # again from here, after a kill
    monkeypatch.setattr(module, "launcher", lambda: "bob@desk")
    _, failed = Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    assert "its odmoe up is at work" in str(failed["127.0.9.1"])
    first.settle(ssh, "mixtral")
    assert Claims(lab, LAB).make(ssh, "mixtral", take_over=False) == ({}, {})
    assert owner(ssh, "127.0.9.1")["launcher"] == "bob@desk"


def test_a_cluster_without_a_claim_is_known_by_its_token(ssh: LocalSsh, lab: ClusterFile, start: Any) -> None:
    """Launched by `ray up` alone, or by an older version."""
    keys = ssh.home("127.0.9.1") / "odmoe" / "keys"
    keys.mkdir(parents=True)
    (keys / "ray_token").write_text("another's")
    assert other_owner(probe(ssh, lab.hosts[0]), LAB) is None  # nothing runs
    start("127.0.9.1", "raylet")
    assert "a cluster that has left no name" in describe_owner(other_owner(probe(ssh, lab.hosts[0]), LAB) or {})
    _, failed = Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    assert list(failed) == ["127.0.9.1"]


@pytest.mark.slow
def test_a_damaged_claim_is_none(ssh: LocalSsh, lab: ClusterFile) -> None:
    for text in ("", "{", "[1]", '"x"'):
        for host in lab.hosts:
            (ssh.home(host.address) / "odmoe").mkdir(exist_ok=True)
            (ssh.home(host.address) / "odmoe" / "owner.json").write_text(text)
        assert Claims(lab, LAB).make(ssh, "mixtral", take_over=False) == ({}, {})


@pytest.mark.slow
def test_another_cluster_s_processes_are_not_ended(ssh: LocalSsh, lab: ClusterFile, start: Any) -> None:
    Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    process = start("127.0.9.1", "worker")
    host = lab.hosts[0]
    for own in (OFFICE, None):
        found = stop_processes(ssh, host, own, release=True)
        assert (found["stopped"], found["owner"]["cluster"]) == ([], "lab")
    assert process.poll() is None
    assert owner(ssh, "127.0.9.1")["id"] == LAB
    assert stop_processes(ssh, host, LAB, release=True)["stopped"] == ["worker"]
    assert not (ssh.home("127.0.9.1") / "odmoe" / "owner.json").exists()


def test_ray_s_own_launcher_keeps_off_another_cluster_s_host(ssh: LocalSsh, lab: ClusterFile) -> None:
    host = lab.hosts[0]
    ssh.run(host, f"{check_owner_command(OFFICE)}; true", 10)
    Claims(lab, LAB).make(ssh, "mixtral", take_over=False)
    ssh.run(host, f"{check_owner_command(LAB)}; true", 10)
    with pytest.raises(HostError, match=r'this host belongs to another cluster: .*"cluster": "lab"'):
        ssh.run(host, f"{check_owner_command(OFFICE)}; true", 10)


def test_one_machine_at_two_addresses(ssh: LocalSsh, lab: ClusterFile) -> None:
    facts = {host.address: probe(ssh, host) for host in lab.hosts}
    assert list(same_machine(facts)) == []
    facts["192.168.0.2"] = facts["127.0.9.2"]
    assert list(same_machine(facts)) == [("127.0.9.2", "192.168.0.2")]


def test_another_ray_is_named() -> None:
    ray = {"pid": 6800, "name": "raylet", "user": "bob", "port": 6380, "since": 0.0}
    facts: dict[str, Any] = {"owner": {}, "processes": [], "other_rays": [ray, ray | {"name": "gcs_server"}]}
    ((cause, advice),) = faults(facts, LAB, take_over=True)
    assert cause == "another Ray runs there: raylet, process 6800 of bob, port 6380, since 1970-01-01 00:00 UTC"
    assert "end it there" in advice
    assert list(faults(facts | {"processes": ["raylet"]}, LAB, take_over=False)) == []
