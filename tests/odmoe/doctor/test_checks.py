"""What the checks say of recorded answers of hosts: a sound one, and the same with a fault."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from odmoe.doctor.machine import Machine, Place, Result, State, Wanted
from odmoe.doctor.needs import Needs, needs_of
from odmoe.doctor.table import CHECKS, run_checks
from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.preflight import Requirements
from support.paths import ROOT

GB = 10**9
PLACE = {"free": 50 * GB, "device": 1, "writable": True, "executes": True}
STORE = {"fault": None, "bytes": 20 * GB, "manifest": "m"}
SOUND: dict[str, Any] = {
    "python": "3.11.7",
    "venv": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "made": 5.0},
    "code": "abc",
    "rsync": "/usr/bin/rsync",
    "make": "/usr/bin/make",
    "venv_module": True,
    "processes": [],
    "owner": {},
    "machine": "x86_64",
    "places": {"~/odmoe": PLACE, "~/odmoe/stores": PLACE, "/tmp/ray": PLACE},
    "addresses": ["10.0.0.13", "127.0.0.1"],
    "listening": {"22": "sshd (process 1)"},
    "stores": {"s": STORE},
    "gpus": [],
    "skew_s": 0.2,
    "processor": {
        "name": "A CPU",
        "machine": "x86_64",
        "flags": ["avx2", "avx512f"],
        "threads": 8,
        "all_threads": 8,
        "cores": 4,
    },
    "ram": {
        "total": 32 * GB,
        "available": 30 * GB,
        "swap_total": 0,
        "swap_free": 0,
        "limit": None,
        "left": None,
    },
    "driver": None,
    "library": None,
    "files": [1024, 65536],
    "secrets": {"/root/odmoe/keys/node.key": 0o600},
    "certificates": ["", ""],
    "kernel": {"release": "6.1", "namespaces": True},
    "commands": {"rsync": "/usr/bin/rsync"},
    "free": 50 * GB,
    "disk": {"rate": 2e9, "direct": True, "source": "a new file"},
    "link": {"to": 9.4e8, "from": 9.4e8, "trip_s": 1e-4},
}
HOSTS = (
    Host("main_node", 0, "10.0.0.11"),
    *(Host("worker_node", n, f"10.0.0.{13 + n}") for n in range(3)),
)
CLUSTER = ClusterFile(Path("c.yaml"), "c", HOSTS, "root", None)
WANTED = Wanted(
    Requirements({"torch": "2.13.0"}, ports={"worker_node": [8701], "main_node": [6379]}, cluster_id="own"),
    cluster=CLUSTER,
    code="abc",
    worker_ports=range(6400, 6500),
)
NEEDS = Needs("m", {"main_node": 4 * GB, "shadow_node": 12 * GB, "worker_node": GB}, 20 * GB, 0, 2 * GB, "int8")


def with_facts(path: str, value: Any) -> dict[str, Any]:
    """A sound host's answer with another value at `a.b`."""
    facts = copy.deepcopy(SOUND)
    *above, last = path.split(".")
    part = facts
    for name in above:
        part = part[name]
    part[last] = value
    return facts


def examined(facts: dict[str, Any], needs: Needs | None = None, place: Place = Place.HOST) -> dict[str, Result]:
    """The results of one machine beside sound ones, by check."""
    host = HOSTS[1] if place is Place.HOST else None
    others = {one.address: SOUND for one in HOSTS} | ({host.address: facts} if host else {})
    wanted = Wanted(WANTED.required, needs, CLUSTER if host else None, "abc", {"torch": "2.13.0"}, range(6400, 6500))
    return {one.name: one for one in run_checks(Machine("m", place, wanted, facts, host, others))}


GPU = {"name": "RTX 3090", "free": 23 * GB, "total": 24 * GB, "level": "sm_86"}
LIBRARY = {"torch": "2.13.0", "cuda": "13.0", "gpus": [GPU], "levels": ["sm_75", "sm_80", "sm_90"]}


def test_a_sound_machine_has_nothing_to_cure() -> None:
    for place in Place:
        found = examined(SOUND, NEEDS, place)
        assert {one.state for one in found.values()} == {State.OK}, found
        assert not any(one.cure for one in found.values())


@pytest.mark.parametrize(
    ("path", "value", "check", "state", "says", "cure"),
    [
        ("venv.python", "3.11.2", "Python", "failure", "3.11.2 (~/odmoe/venv), the main host's is 3.11.7", "same"),
        ("venv.packages", {"torch": "2.12.0"}, "packages", "failure", "torch 2.12.0 (wanted 2.13.0)", "odmoe up"),
        ("venv", None, "packages", "ok", "none yet", ""),
        ("code", "f00", "our code", "warning", "f00, this machine has abc", "odmoe up brings"),
        ("commands", {"rsync": None}, "commands", "failure", "missing: rsync", "apt-get install"),
        ("machine", "aarch64", "processor", "failure", "is aarch64, the main host's is x86_64", "one kind"),
        ("processor.flags", ["avx2"], "processor", "warning", "the main host has AVX2, AVX-512", "one kind"),
        ("processor.threads", 2, "cores", "ok", "of which 2 may be used", ""),
        ("ram.available", GB, "memory", "failure", "1.00 GB of 32.00 GB free, 1.83 GB needed", "--experts int4"),
        ("ram.left", GB, "memory", "failure", "1.00 GB of 32.00 GB free", "--experts int4"),
        ("ram.swap_total", 4 * GB, "swap", "warning", "4.00 GB of 4.00 GB used", "close other programs"),
        ("free", 1000, "disk room", "failure", "the disk is full", "odmoe host-stores"),
        ("stores", {"s": {"fault": "layer-0 is 3 bytes"}}, "store", "failure", "layer-0 is 3 bytes", "odmoe up c.yaml"),
        ("stores", {}, "store", "failure", "missing: s, which other hosts have", "odmoe up c.yaml -m MODEL"),
        ("verified", {"s": "expert 3 is damaged"}, "store", "failure", "expert 3 is damaged", "odmoe up c.yaml"),
        ("verify_fault", "no code", "store", "not checked", "no code", ""),
        ("disk.rate", 9e7, "disk speed", "warning", "0.09 GB/s", "NVMe"),
        ("disk", {"fault": "--quick"}, "disk speed", "not checked", "--quick", ""),
        ("disk.rate", 5e8, "disk speed", "warning", "other workers' disks reach 2.00 GB/s", "NVMe"),
        ("disk.direct", False, "disk speed", "ok", "no O_DIRECT", ""),
        ("link.from", 9.3e7, "link", "warning", "93 Mbit/s to it", "cable"),
        ("link.trip_s", 0.004, "link", "warning", "4.00 ms there and back: far", "cable"),
        ("link", {"blocked": "port 6400"}, "link", "failure", "not reached from the main host", "firewall"),
        ("addresses", ["10.0.0.7"], "address", "failure", "10.0.0.13 is no address of its own", "reach it"),
        ("skew_s", -90.0, "clock", "failure", "90 s behind", "timedatectl"),
        ("skew_s", 9.0, "clock", "warning", "+9 s", "timedatectl"),
        ("listening", {"8701": "nc (process 2)"}, "ports", "failure", "8701 by nc (process 2)", "end that program"),
        ("listening", {"6433": "nc (process 2)"}, "ports", "warning", "6433 by nc", "end that program"),
        ("secrets", {"/k/secret": 0o644}, "secrets", "failure", "can read /k/secret", "chmod 600 /k/secret"),
        ("certificates", ["-----BEGIN"], "certificates", "failure", "cannot be read", "odmoe certs --renew"),
        ("files", [256, 1024], "open files", "warning", "1024 open files", "LimitNOFILE"),
        ("places", {"~/odmoe": PLACE | {"writable": False}}, "folders", "failure", "cannot be written", "belong"),
    ],
)
def test_a_fault_is_named_with_its_cure(path: str, value: Any, check: str, state: str, says: str, cure: str) -> None:
    needs = NEEDS if check == "memory" else None
    found = examined(with_facts(path, value), needs)
    assert (found[check].state, says in found[check].value, cure in found[check].cure) == (state, True, True), found[
        check
    ]
    failed = {one.name for one in found.values() if one.state is State.FAILURE} - {check}
    assert not failed, failed


@pytest.mark.parametrize(
    ("library", "state", "says"),
    [
        (LIBRARY, "ok", "RTX 3090, 23.00 GB of 24.00 GB free; CUDA 13.0, driver 535.1"),
        (LIBRARY | {"cuda": None, "gpus": []}, "warning", "built without CUDA"),
        (LIBRARY | {"gpus": []}, "failure", "driver is 535.1; it needs 580 or newer"),
        (LIBRARY | {"gpus": [GPU | {"level": "sm_61"}]}, "failure", "no code for RTX 3090 (sm_61)"),
        ({"fault": "there is no environment yet"}, "not checked", "no environment"),
        (None, "not checked", "torch was not asked"),
    ],
)
def test_a_gpu_beside_what_torch_can_use(library: Any, state: str, says: str) -> None:
    """`level`: a build for sm_80 runs on sm_86, but not on sm_61 or sm_120, as CUDA's compatibility has it."""
    facts = SOUND | {"gpus": ["RTX 3090"], "driver": "535.1", "library": library}
    found = examined(facts)["GPU"]
    assert (found.state, says in found.value) == (state, True), found


def test_a_worker_that_is_down_while_the_cluster_runs() -> None:
    others = {one.address: SOUND | {"processes": ["raylet", "gcs_server"]} for one in HOSTS}
    machine = Machine("worker-0", Place.HOST, WANTED, SOUND, HOSTS[1], others | {HOSTS[1].address: SOUND})
    found = run_checks(machine)[0]
    assert (found.name, found.state) == ("node", State.FAILURE)
    assert "its node is down" in found.value
    assert "odmoe up starts it" in found.cure


def test_one_machine_without_room_for_a_shadow_is_told_which_system_has_none() -> None:
    facts = with_facts("ram.available", 8 * GB)
    found = examined(facts, NEEDS, Place.ALONE)["memory"]
    assert (found.state, "lrfu-prefetch" in found.cure) == (State.WARNING, True)
    assert examined(with_facts("ram.available", 4 * GB), NEEDS, Place.ALONE)["memory"].state is State.FAILURE


def test_a_model_that_is_not_here_yet_needs_room_for_its_download() -> None:
    needs = replace(NEEDS, download=20 * GB)
    facts = SOUND | {"free": 30 * GB, "stores": {}}
    assert examined(facts, NEEDS, Place.ALONE)["disk room"].state is State.OK
    found = examined(facts, needs, Place.ALONE)["disk room"]
    assert (found.state, "needed for the download and the store" in found.value) == (State.FAILURE, True)


def test_two_addresses_of_one_machine() -> None:
    found = examined(SOUND | {"home_id": "b:1:2"})["address"]
    assert found.state is State.OK
    others = {one.address: SOUND | {"home_id": "b:1:2"} for one in HOSTS[:2]}
    found = {one.name: one for one in run_checks(Machine("m", Place.HOST, WANTED, SOUND, HOSTS[1], others))}["address"]
    assert (found.state, found.value) == (State.FAILURE, "it is the same machine as main (10.0.0.11)")


def test_a_launching_machine_whose_own_clock_is_wrong() -> None:
    others = {one.address: SOUND | {"skew_s": 600.0 + n} for n, one in enumerate(HOSTS)}
    found = {one.name: one for one in run_checks(Machine("m", Place.LAUNCHER, WANTED, SOUND, None, others))}
    assert found["clock"].state is State.FAILURE
    assert "602 s behind most hosts' clocks" in found["clock"].value


@pytest.mark.parametrize("place", Place)
def test_answers_that_are_missing_or_of_another_shape_are_not_checked(place: Place) -> None:
    for name in SOUND:
        for value in (None, "x", [], {}, [None], {"x": 1}, -1, 1e400):
            examined(SOUND | {name: value}, NEEDS, place)
        without = {key: fact for key, fact in SOUND.items() if key != name}
        found = examined(without | {"unknown": "it took too long"}, NEEDS, place)
        assert len(found) == sum(place in check.places for check in CHECKS)
    nothing = examined({"python": "3.5.2", "unknown": "it took too long"}, NEEDS, place)
    assert {one.state for one in nothing.values()} <= {State.UNKNOWN, State.OK, State.FAILURE}
    assert nothing["Python"].state is State.FAILURE
    assert nothing["open files"].value == "it took too long"


def test_what_mixtral_needs() -> None:
    """Sizes by hand, from config.json, in bfloat16's 2 bytes: Mixtral's 32 layers of 8 experts, each 3 x 4096 x 14336.

    A shadow in int8 has a byte for each of their 46.7e9 weights in linear layers, and more for the rest.
    """
    found = needs_of(str(ROOT / "tests/data/configs/mixtral-8x7b.json"), "int8", 8)
    expert = 3 * 4096 * 14336
    item = found.token // (32 * 2 * expert)
    assert found.token == 32 * 2 * expert * item
    assert item in (2, 4)
    assert found.store > 32 * 8 * expert * item
    assert 46.5e9 < found.memory["shadow_node"] < 50e9
    assert found.memory["worker_node"] >= expert * item
