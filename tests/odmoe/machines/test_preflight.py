"""Which hosts are fit, from what they report."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from odmoe.machines.cluster_file import Host
from odmoe.machines.preflight import Requirements, check, pinned_versions
from scheduler.errors import HostError


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
            "1.07 GB are free .* the store s needs 2.4",
        ),
        ({"skew_s": 61.0}, WANTED, "its clock is 61 s ahead of this machine's, and certificates .*timedatectl"),
        ({"skew_s": -90.0}, WANTED, "its clock is 90 s behind this machine's"),
        ({"rsync": None, "skew_s": 61.0}, WANTED, "no command rsync; its clock is 61 s"),
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
