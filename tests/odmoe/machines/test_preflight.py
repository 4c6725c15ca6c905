"""Which hosts are fit, from what they report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from odmoe.machines.cluster_file import Host
from odmoe.machines.preflight import Requirements, check, pinned_versions, ports_of, preflight
from scheduler.errors import HostError
from support.paths import ROOT


def test_the_lock_names_what_is_installed_here() -> None:
    found = pinned_versions()
    assert {"torch", "ray", "grpcio", "transformers", "bitsandbytes"} <= found.keys()
    assert found == {name: version(name).partition("+")[0] for name in found}


FIT: dict[str, Any] = {
    "python": "3.11.2",
    "venv": {"python": "3.12.1", "packages": {"torch": "2.13.0", "ray": "2.60.0"}, "made": 50.0},
    "code": "abc",
    "rsync": "/usr/bin/rsync",
    "make": "/usr/bin/make",
    "venv_module": True,
    "stores": {},
    "disk_free": 10 << 30,
    "skew_s": 0.4,
}
PLACE = {"free": 10 << 30, "device": 1, "writable": True, "executes": True}
FIT |= {
    "machine": "x86_64",
    "addresses": ["10.0.0.7", "127.0.0.1"],
    "listening": {"22": "sshd (process 1)"},
    "places": {"~/odmoe": PLACE, "~/odmoe/stores": PLACE, "/tmp/ray": PLACE},
}
PORTS = {"worker_node": [6380, 8701], "main_node": [6379]}
WANTED = Requirements({"torch": "2.13.0", "ray": "2.60.0"})


@pytest.mark.parametrize(
    ("change", "wanted", "message"),
    [
        ({"python": "3.9.2", "venv": None}, WANTED, "its Python is 3.9.2, 3.11 or newer is needed; install Python"),
        (
            {"venv": {"python": "3.10.1", "packages": FIT["venv"]["packages"], "made": 50.0}},
            WANTED,
            "its Python is 3.10.1, 3.11 or",
        ),
        ({"rsync": None}, WANTED, "there is no command rsync; apt-get install rsync there"),
        ({"venv": None, "make": None}, WANTED, "no command make"),
        ({"venv": None, "venv_module": False}, WANTED, "no module venv.*python3-venv"),
        (
            {"venv": {"python": "3.11.2", "packages": {"torch": "2.12.1"}, "made": 50.0}},
            WANTED,
            r"other versions in ~/odmoe/venv: torch 2.12.1 \(wanted 2.13.0\), ray missing \(wanted 2.60.0\);",
        ),
        ({"code": "f00d"}, Requirements({}, code="beef"), r"other code than this machine's \(f00d\), beef is wanted"),
        (
            {"disk_free": 1 << 30},
            Requirements({}, store=("s", "m", 2 << 30)),
            "1.07 GB are free in ~/odmoe/stores, the store s needs 2.4",
        ),
        ({"skew_s": 61.0}, WANTED, "its clock is 61 s ahead of this machine's, and certificates .*timedatectl"),
        ({"skew_s": -90.0}, WANTED, "its clock is 90 s behind this machine's"),
        ({"rsync": None, "skew_s": 61.0}, WANTED, "no command rsync; its clock is 61 s"),
        (
            {"listening": {"8701": "python (process 12)", "6379": "redis-server (process 7)"}},
            Requirements({}, ports=PORTS),
            r"ports of the cluster are taken: 8701 by python \(process 12\); end that program there",
        ),
        (
            {"addresses": ["192.168.1.5", "127.0.0.1"]},
            WANTED,
            "10.0.0.7 is no address of its own; it has 192.168.1.5; give",
        ),
        (
            {"places": {"~/odmoe": PLACE | {"executes": False}}},
            WANTED,
            r"no program can run from ~/odmoe \(noexec\); mount the home there without noexec",
        ),
        (
            {"places": {"~/odmoe": PLACE, "~/odmoe/stores": PLACE | {"writable": False}}},
            WANTED,
            "~/odmoe/stores cannot be written; make it belong",
        ),
        (
            {"places": {"~/odmoe": PLACE, "/tmp/ray": PLACE | {"device": 2, "free": 1 << 20}}},
            WANTED,
            "0.00 GB are free in /tmp/ray, 0.27 are needed; make room there",
        ),
        (
            {"venv": None, "places": {"~/odmoe": PLACE | {"free": 1 << 30}}},
            WANTED,
            "1.07 GB are free in ~/odmoe, 2.15 are needed",
        ),
    ],
)
def test_what_is_wrong_with_a_host(change: dict[str, Any], wanted: Requirements, message: str) -> None:
    host = Host("worker_node", 5, "10.0.0.7")
    check(host, FIT, WANTED)
    with pytest.raises(HostError, match=r"^worker-5 \(10.0.0.7\): .*" + message):
        check(host, FIT | change, wanted)


def test_an_environment_older_than_the_lock_is_made_good_by_ray_up() -> None:
    host, old = Host("worker_node", 5, "10.0.0.7"), {"python": "3.11.2", "packages": {"torch": "2.12.1"}, "made": 50.0}
    versions = WANTED.versions
    check(host, FIT | {"venv": old}, Requirements(versions, lock_time=51.0))
    for wanted in (Requirements(versions, lock_time=49.0), Requirements(versions, code="abc", lock_time=51.0)):
        with pytest.raises(HostError, match=r"torch 2\.12\.1"):
            check(host, FIT | {"venv": old}, wanted)


def test_a_store_that_is_there_or_half_there_needs_no_more_room() -> None:
    host, wanted = Host("worker_node", 5, "10.0.0.7"), Requirements({}, store=("s", "m", 2 << 30))
    there = {"manifest": "m", "fault": None, "bytes": 2 << 30}
    check(host, FIT | {"disk_free": 1 << 20, "stores": {"s": there}}, wanted)
    half = {"manifest": "m", "fault": "x is missing", "bytes": 1 << 30}
    check(host, FIT | {"disk_free": 2 << 30, "stores": {"s": half}}, wanted)
    with pytest.raises(HostError, match="are free"):
        check(host, FIT | {"disk_free": 1 << 30, "stores": {"s": half}}, wanted)


MAIN = Host("main_node", 0, "10.0.0.1")
WORKERS = [Host("worker_node", number, f"10.0.0.{number + 2}") for number in range(2)]


class Asked:
    """What hosts answer, by address."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    def each(self, hosts: list[Host], job: Any) -> dict[str, Any]:
        return {host.address: self._answers[host.address] for host in hosts}


def facts(**change: Any) -> dict[str, Any]:
    return {**FIT, "addresses": [], **change}


def venv(python: str) -> dict[str, Any]:
    return {**FIT["venv"], "python": python}


@pytest.mark.parametrize(
    ("main", "worker", "message"),
    [
        (
            {"venv": None},
            {"venv": None, "python": "3.11.7"},
            r"3.11.7 \(python3\), the main host's is 3.11.2.*same",
        ),
        ({"venv": venv("3.11.7")}, {"venv": venv("3.11.2")}, r"3.11.2 \(~/odmoe/venv\), the main host's is 3.11.7"),
        ({"venv": venv("3.11.7")}, {"venv": None}, r"its Python is 3.11.2 \(python3\)"),
        ({}, {"machine": "aarch64"}, "its processor is aarch64, the main host's is x86_64.*use hosts of one kind"),
    ],
)
def test_hosts_are_compared_with_the_main_host(main: dict[str, Any], worker: dict[str, Any], message: str) -> None:
    answers = {MAIN.address: facts(**main), WORKERS[0].address: facts(**main), WORKERS[1].address: facts(**worker)}
    fit, failed = preflight(Asked(answers), [MAIN, *WORKERS], WANTED)  # type: ignore[arg-type]
    assert (set(fit), set(failed)) == ({MAIN.address, WORKERS[0].address}, {WORKERS[1].address})
    assert re.search(r"^worker-1 \(10.0.0.3\): .*" + message, str(failed[WORKERS[1].address]))


def test_all_findings_of_all_hosts_come_at_once() -> None:
    """Also where the main host itself is unfit, or is not reached."""
    gone = HostError("worker-0 (10.0.0.2): there is no route to it")
    answers = {
        MAIN.address: facts(rsync=None),
        WORKERS[0].address: gone,
        WORKERS[1].address: facts(venv=venv("3.11.2"), skew_s=90.0, listening={"8701": "x (process 1)"}),
    }
    fit, failed = preflight(Asked(answers), [MAIN, *WORKERS], Requirements({}, ports=PORTS))  # type: ignore[arg-type]
    assert (fit, failed[WORKERS[0].address]) == ({}, gone)
    assert "rsync" in str(failed[MAIN.address])
    for word in ("3.11.2", "clock", "8701"):
        assert word in str(failed[WORKERS[1].address])
    answers[MAIN.address] = HostError("main (10.0.0.1): it does not answer ssh")
    _, failed = preflight(Asked(answers), [MAIN, *WORKERS], Requirements({}))  # type: ignore[arg-type]
    assert "Python" not in str(failed[WORKERS[1].address])


def test_the_ports_are_those_of_the_cluster_file() -> None:
    found = ports_of(ROOT / "cluster.yaml")
    assert found == {
        "main_node": [6379, 6380, 6381],
        "worker_node": [6380, 6381, 8701],
        "shadow_node": [6380, 6381, 8701],
    }


# --- what the probe finds on this machine -----------------------------------------------------------------------------


def probed(home: Path, *unshared: str) -> dict[str, Any]:
    """Its facts about this machine, with a home of its own; `unshared`: a shell command that runs before."""
    command = [sys.executable, str(ROOT / "odmoe" / "machines" / "probe.py"), "facts"]
    if unshared:
        command = ["unshare", "-m", "sh", "-c", f"{unshared[0]} && exec {' '.join(command)}"]
    done = subprocess.run(command, env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, timeout=60)
    if unshared and done.returncode:
        pytest.skip(f"no mounts of its own here: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_who_listens_at_a_port_is_named_unless_it_is_ours(tmp_path: Path) -> None:
    program = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    mark = {"RAY_AUTH_TOKEN_PATH": f"{tmp_path}/odmoe/keys/ray_token"}
    ports = []
    with contextlib.ExitStack() as ended:
        for environment, source in ((os.environ, program), ({**os.environ, **mark}, child)):
            process = ended.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", source], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            assert process.stdout is not None
            ports.append((int(process.stdout.readline()), process.pid))
        listening = probed(tmp_path)["listening"]
    (port, pid), (own, _) = ports
    assert listening[str(port)].endswith(f"(process {pid})")
    assert str(own) not in listening


def test_a_disk_of_its_own_for_the_stores_and_one_without_programs(tmp_path: Path) -> None:
    (tmp_path / "odmoe" / "stores").mkdir(parents=True)
    mounts = f"mount -t tmpfs -o size=3m,noexec none {tmp_path}/odmoe && mkdir {tmp_path}/odmoe/stores"
    found = probed(tmp_path, f"{mounts} && mount -t tmpfs -o size=7m none {tmp_path}/odmoe/stores")
    assert found["disk_free"] == 7 << 20
    places = found["places"]
    assert places["~/odmoe"]["free"] == 3 << 20
    assert [places[name]["executes"] for name in ("~/odmoe", "~/odmoe/stores")] == [False, True]
    readonly = probed(tmp_path, f"mount -t tmpfs -o ro none {tmp_path}/odmoe")["places"]
    assert not readonly["~/odmoe/stores"]["writable"]


def test_a_host_knows_its_addresses(tmp_path: Path) -> None:
    assert "127.0.0.1" in probed(tmp_path)["addresses"]
