"""What hosts say of themselves over a real sshd, and which of them are fit.

Takes about 20 s on two idle cores.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from odmoe.machines.cluster_file import Host
from odmoe.machines.preflight import Requirements, check, pinned_versions, preflight, probe, stop_processes
from odmoe.machines.ssh import Ssh
from scheduler.errors import HostError
from support.machines.ssh_hosts import SshHosts

pytestmark = pytest.mark.system


@pytest.fixture
def home(hosts: SshHosts) -> Path:
    """Of the first host, with this project's own environment."""
    path = hosts.home(hosts.addresses[0])
    (path / "odmoe").mkdir()
    os.symlink(sys.prefix, path / "odmoe" / "venv")
    return path


def test_a_host_says_what_it_has(hosts: SshHosts, ssh: Ssh, home: Path) -> None:
    (home / "odmoe" / "code").mkdir()
    (home / "odmoe" / "code" / "SHIPPED").write_text("abc\n")
    facts = probe(ssh, hosts.host)
    assert facts["home"] == str(home)
    assert facts["code"] == "abc"
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory"]["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs(facts["disk_free"] - shutil.disk_usage(home).free) < 1 << 30
    assert facts["rsync"] == shutil.which("rsync")
    assert abs(facts["skew_s"]) < 5
    assert facts["processes"] == []
    assert {n: facts["venv"]["packages"].get(n) for n in pinned_versions()} == pinned_versions()
    assert facts["venv"]["python"] == ".".join(map(str, sys.version_info[:3]))
    check(hosts.host, facts, Requirements(pinned_versions()))
    check(hosts.host, facts, Requirements(pinned_versions(), code="abc"))


def test_a_bare_host_is_fit_before_it_gets_code_and_not_after(hosts: SshHosts, ssh: Ssh) -> None:
    bare = Host("worker_node", 2, hosts.addresses[3])
    facts = probe(ssh, bare)
    assert (facts["venv"], facts["code"], facts["stores"]) == (None, None, {})
    check(bare, facts, Requirements(pinned_versions()))
    with pytest.raises(HostError, match=r"worker-2 \(127.0.99.4\): there is no environment.*it has no code, abc is"):
        check(bare, facts, Requirements(pinned_versions(), code="abc"))


def test_a_python_too_old_to_be_asked(hosts: SshHosts, ssh: Ssh) -> None:
    """A 3.5: it says its version, and can run nothing else of ours."""
    hosts.give_old_python(0)
    facts = probe(ssh, hosts.host)
    assert facts == {"python": "3.5.2"}
    with pytest.raises(HostError, match=r"its Python is 3.5.2, 3.11 or newer is needed"):
        check(hosts.host, facts, Requirements({}))


def test_every_host_that_fails_is_named_beside_those_that_do_not(hosts: SshHosts, ssh: Ssh, home: Path) -> None:
    other = hosts.home(hosts.addresses[1])
    site = other / "odmoe" / "venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for name in ("torch-2.12.0+cpu", "ray-2.60.0", "huggingface_hub-2.4.0"):
        (site / f"{name}.dist-info").mkdir()
    (other / "odmoe" / "venv" / "bin").mkdir()
    os.symlink(sys.executable, other / "odmoe" / "venv" / "bin" / "python")
    (other / "odmoe" / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
    machines = [Host("worker_node", n, a) for n, a in enumerate([*hosts.addresses[:2], "127.0.98.1"])]
    facts, failed = preflight(ssh, machines, Requirements(pinned_versions()))
    assert list(facts) == [hosts.addresses[0]]
    assert list(failed) == [hosts.addresses[1], "127.0.98.1"]
    skew = str(failed[hosts.addresses[1]])
    count = len(pinned_versions()) - 2 - 3  # two are right, three are named
    assert "worker-1 (127.0.99.2): other versions in ~/odmoe/venv: torch 2.12.0 (wanted 2.13.0), " in skew
    assert f" and {count} more; remove ~/odmoe/venv there" in skew
    assert "worker-2 (127.0.98.1): ssh is refused at port" in str(failed["127.0.98.1"])


def test_what_a_login_shell_prints_does_no_harm(hosts: SshHosts, ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ssh.run
    monkeypatch.setattr(Ssh, "run", lambda self, *args: "Welcome!\n{\n" + run(self, *args))
    assert probe(ssh, hosts.host)["home"]
    monkeypatch.setattr(Ssh, "run", lambda self, *args: "Welcome!\n")
    with pytest.raises(HostError, match=r"main \(127.0.99.1\): its python3 answered 'Welcome!"):
        probe(ssh, hosts.host)


def damaged(folder: Path, how: str) -> None:
    blobs = [{"offset": 0, "length": 4096}, {"offset": 4096, "length": 4096}]
    manifest = {
        "format": 2,
        "fingerprint": "f",
        "dtype": "float32",
        "dense": {"config.json": "0"},
        "layers": {"0": {"file": "layer-0", "blobs": blobs}},
    }
    (folder / "dense").mkdir(parents=True)
    (folder / "dense" / "config.json").write_text("{}")
    (folder / "layer-0").write_bytes(b"\0" * (8191 if how == "short" else 8192))
    if how == "missing":
        (folder / "layer-0").unlink()
    if how == "dense":
        (folder / "dense" / "config.json").unlink()
    (folder / "manifest.json").write_text("{" if how == "torn" else json.dumps(manifest))


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("whole", None),
        ("short", "layer-0 is 8191 bytes, the manifest says 8192"),
        ("missing", "layer-0 cannot be read (No such file or directory)"),
        ("dense", "dense/config.json cannot be read (No such file or directory)"),
        ("torn", "manifest.json is damaged"),
    ],
)
def test_stores_and_what_is_wrong_with_them(hosts: SshHosts, ssh: Ssh, home: Path, how: str, fault: str | None) -> None:
    damaged(home / "odmoe" / "stores" / "a", how)
    (home / "odmoe" / "stores" / "no store").mkdir()
    stores = probe(ssh, hosts.host)["stores"]
    assert list(stores) == ["a"]
    assert stores["a"]["fault"] == fault or str(stores["a"]["fault"]).startswith(str(fault))
    if how == "whole":
        assert (stores["a"]["fingerprint"], stores["a"]["dtype"], stores["a"]["bytes"]) == ("f", "float32", 8194)


def test_processes_of_the_cluster_are_found_and_ended_and_no_others(hosts: SshHosts, ssh: Ssh, home: Path) -> None:
    """One that ends when asked, one that does not mind; one of the same name that is none of ours."""
    ours = os.environ | {"RAY_AUTH_TOKEN_PATH": f"{home}/odmoe/keys/ray_token"}
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    started = [
        subprocess.Popen(["sleep", "600"], env=ours),
        subprocess.Popen([sys.executable, "-c", deaf, "raylet"], env=ours, stdout=subprocess.PIPE),
        subprocess.Popen(["sleep", "600"], env=ours | {"RAY_AUTH_TOKEN_PATH": "/another/keys/ray_token"}),
    ]
    try:
        if started[1].stdout:
            started[1].stdout.readline()
        assert len(probe(ssh, hosts.host)["processes"]) == 2
        done = stop_processes(ssh, hosts.host, None, release=False)
        assert (len(done["stopped"]), done["left"]) == (2, [])
        assert [p.wait(60) for p in started[:2]] == [-signal.SIGTERM, -signal.SIGKILL]
        assert started[2].poll() is None
        assert stop_processes(ssh, hosts.host, None, release=False) == {"stopped": [], "left": []}
    finally:
        for process in started:
            process.kill()
            process.communicate()
