"""Commands, streams and copies over a real sshd, and what is said when they fail.

Takes about 30 s on two idle cores. Upper bounds only tell a hang from an end.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odmoe.machines.cluster_file import Host
from odmoe.machines.ssh import Ssh
from scheduler.errors import ConfigError, HostError, LinkError
from support.machines.processes import HANG_S, wait_until
from support.machines.ssh_hosts import SshHosts, make_key

pytestmark = pytest.mark.system


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_until_over(pid: int) -> None:
    wait_until(lambda: not runs(pid), f"process {pid} is gone")


def other(hosts: SshHosts, tmp_path: Path, **how: Any) -> Ssh:
    given = {"user": getpass.getuser(), "key": hosts.key, "known_hosts": tmp_path / "known_hosts", "port": hosts.port}
    return Ssh(**(given | how))


def test_a_command_its_input_and_its_output(hosts: SshHosts, ssh: Ssh) -> None:
    text = 'it\'s "quoted" $HOME `x` \\ \n second line: é'
    assert ssh.run(hosts.host, "cat", 60, text.encode()) == text
    assert ssh.run(hosts.host, "printf %s 'a  b'; printf %s \"$HOME\"", 60) == f"a  b{hosts.home(hosts.addresses[0])}"
    assert ssh.run(hosts.host, "cat", 60) == ""  # no input is the end of input, not ours


def test_one_connection_serves_every_command_and_ends_with_it(hosts: SshHosts, tmp_path: Path) -> None:
    with other(hosts, tmp_path) as ssh:
        first, second = (ssh.run(hosts.host, 'echo "$SSH_CONNECTION"', 60) for _ in range(2))
        assert first == second
        path = next(option for option in ssh.options() if option.startswith("ControlPath="))
        sockets = Path(path.partition("=")[2]).parent
        assert [stat.S_ISSOCK(file.stat().st_mode) for file in sockets.iterdir()] == [True]
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert not sockets.exists()
    with pytest.raises(HostError, match="ending"):
        ssh.run(hosts.host, "true", 60)


def test_hosts_at_once_and_those_that_fail_beside_those_that_do_not(hosts: SshHosts, ssh: Ssh) -> None:
    machines = [Host("worker_node", n, address) for n, address in enumerate(hosts.addresses)]

    together = threading.Barrier(len(machines))

    def job(host: Host) -> str:
        together.wait(HANG_S)
        return ssh.run(host, "exit 3" if host.number == 1 else "echo $HOME", 60).strip()

    found = ssh.each(machines, job)
    assert list(found) == list(hosts.addresses)
    assert isinstance(found.pop(hosts.addresses[1]), HostError)
    assert found == {address: str(hosts.home(address)) for address in found}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo some; echo first >&2; echo the reason >&2; exit 3", r"main \(127.0.99.1\): .*exit code 3: the reason"),
        ("no-such-tool --now", r"main \(127.0.99.1\): there is no command no-such-tool; install no-such-tool there"),
        ("exit 7", "exit code 7: no message"),
        # What a program on the host says of connections of its own is no message of ssh.
        ("echo 'GET / 200: Connection refused by 10.0.0.1, timed out' >&2; exit 255", "exit code 255: GET / 200: Conn"),
        ("echo 'Permission denied (publickey).' >&2; exit 255", "exit code 255: Permission denied"),
    ],
)
def test_a_failing_command_names_host_code_and_reason(hosts: SshHosts, ssh: Ssh, command: str, message: str) -> None:
    with pytest.raises(HostError, match=message):
        ssh.run(hosts.host, command, 60)


def test_a_command_that_takes_too_long_is_ended_there_too(hosts: SshHosts, ssh: Ssh) -> None:
    home = hosts.home(hosts.addresses[0])
    ssh.run(hosts.host, "true", 60)  # they are connected
    with pytest.raises(HostError, match=r"main \(127.0.99.1\): `echo .*` had not ended after 3 s"):
        ssh.run(hosts.host, "echo $$ > ~/pid; exec sleep 600", 3)
    wait_until_over(int((home / "pid").read_text()))


def test_refused_and_unreachable(hosts: SshHosts, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.99.1", 0))
        port = free.getsockname()[1]
        with (
            other(hosts, tmp_path, port=port) as ssh,
            pytest.raises(HostError, match=rf"refused at port {port}; start"),
        ):
            ssh.run(hosts.host, "true", 60)


def test_a_host_that_takes_the_connection_and_says_nothing(
    hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odmoe.machines.ssh.CONNECT_S", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.99.1", 0))
        silent.listen()
        with (
            other(hosts, tmp_path, port=silent.getsockname()[1]) as ssh,
            pytest.raises(HostError, match="not answer ssh"),
        ):
            ssh.run(hosts.host, "true", 200)


def test_a_key_that_is_not_accepted_and_one_that_is_not_there(hosts: SshHosts, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    make_key(stranger)
    with (
        other(hosts, tmp_path, key=stranger) as ssh,
        pytest.raises(
            HostError,
            match=rf"not accept the key {stranger}.*"
            r"ssh-copy-id -i",
        ),
    ):
        ssh.run(hosts.host, "true", 60)
    with pytest.raises(ConfigError, match=r"the ssh key .*/none is not there; make one"):
        other(hosts, tmp_path, key=tmp_path / "none")


def test_a_host_key_is_held_to(hosts: SshHosts, tmp_path: Path) -> None:
    with other(hosts, tmp_path) as ssh:
        ssh.run(hosts.host, "true", 60)
    known = tmp_path / "known_hosts"
    assert stat.S_IMODE(known.stat().st_mode) == 0o600
    another = tmp_path / "another"
    make_key(another)
    name = known.read_text().split()[0]
    known.write_text(f"{name} {' '.join(another.with_suffix('.pub').read_text().split()[:2])}\n")
    with other(hosts, tmp_path) as ssh, pytest.raises(HostError, match="host key is not the one") as error:
        ssh.run(hosts.host, "true", 60)
    advice = str(error.value).partition("ssh-keygen -f ")[2].partition(";")[0]
    subprocess.run(f"ssh-keygen -f {advice}", shell=True, check=True, timeout=30, capture_output=True)
    with other(hosts, tmp_path) as ssh:  # the advice helps
        ssh.run(hosts.host, "true", 60)


def test_a_stream_both_ways(hosts: SshHosts, ssh: Ssh) -> None:
    remote = ssh.start(hosts.host, 'while read -r line; do echo "got $line"; done; echo end')
    remote.send("one\ntwo\n")
    lines = remote.lines(60, time.monotonic() + HANG_S)
    assert [next(lines), next(lines)] == ["got one", "got two"]
    remote.stdin.close()
    assert list(lines) == ["end"]
    assert remote.process.returncode == 0


def test_a_stream_that_fails_says_why(hosts: SshHosts, ssh: Ssh) -> None:
    remote = ssh.start(hosts.host, "echo one; echo the reason >&2; exit 4")
    with pytest.raises(HostError, match=r"main \(127.0.99.1\).*exit code 4: the reason"):
        list(remote.lines(60, time.monotonic() + HANG_S))


def test_silence_of_a_stream_is_bounded(hosts: SshHosts, ssh: Ssh) -> None:
    remote = ssh.start(hosts.host, "sleep 600", grace_s=0.2)
    with pytest.raises(LinkError, match="nothing was heard for 1 s"):
        list(remote.lines(1, time.monotonic() + HANG_S))
    with pytest.raises(LinkError, match="nothing was heard"):
        list(remote.lines(30, time.monotonic() + 1))
    remote.close()


@pytest.mark.parametrize("end", ["input", "kill", "close"])
def test_a_command_ends_with_whoever_started_it(hosts: SshHosts, tmp_path: Path, end: str) -> None:
    """One that neither reads its input nor minds being asked: by its end, our death, the connection's end."""
    ssh = other(hosts, tmp_path)
    remote = ssh.start(hosts.host, "trap '' TERM HUP; echo $$; while :; do sleep 0.2; done", grace_s=0.3)
    pid = int(next(remote.lines(60, time.monotonic() + HANG_S)))
    time.sleep(0.5)
    assert runs(pid)
    if end == "input":
        remote.stdin.close()
    elif end == "kill":
        os.killpg(remote.process.pid, signal.SIGKILL)
    else:
        ssh.close()
    wait_until_over(pid)
    ssh.close()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "a source"
    (folder / "dense").mkdir(parents=True)
    for name, size in (("layer-0", 3_000_000), ("layer-1", 2_000_000), ("dense/x", 10), ("manifest.json", 100)):
        (folder / name).write_bytes(os.urandom(size))
    return folder


def test_a_copy_is_the_same_and_says_how_far_it_is(hosts: SshHosts, ssh: Ssh, source: Path) -> None:
    seen: list[tuple[int, int]] = []
    ssh.push(hosts.host, [f"{source}/"], "~/odmoe/stores/a b", progress=lambda *at: seen.append(at))
    there = hosts.home(hosts.addresses[0]) / "odmoe" / "stores" / "a b"
    assert tree(there) == tree(source)
    assert seen[-1] == (5_000_110, 5_000_110)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 2
    (there / "stranger").write_text("x")
    ssh.push(hosts.host, [f"{source}/"], "~/odmoe/stores/a b")
    assert (there / "stranger").exists()
    ssh.push(hosts.host, [f"{source}/"], "~/odmoe/stores/a b", delete=True)
    assert tree(there) == tree(source)


def test_the_last_file_comes_last(hosts: SshHosts, ssh: Ssh, source: Path, tmp_path: Path) -> None:
    """An obstacle in the way of another file: the manifest is not there, and is as soon as the obstacle is not."""
    there = hosts.home(hosts.addresses[0]) / "odmoe" / "last"
    (there / "layer-1" / "in the way").mkdir(parents=True)
    with pytest.raises(HostError, match=r"main \(127.0.99.1\)"):
        ssh.push(hosts.host, [f"{source}/"], "~/odmoe/last", last="manifest.json")
    assert (there / "layer-0").is_file()
    assert not (there / "manifest.json").exists()
    (there / "layer-1" / "in the way").rmdir()
    (there / "layer-1").rmdir()
    ssh.push(hosts.host, [f"{source}/"], "~/odmoe/last", last="manifest.json")
    assert tree(there) == tree(source)


def test_modes(hosts: SshHosts, ssh: Ssh, source: Path) -> None:
    ssh.push(hosts.host, [source / "manifest.json"], "~/odmoe/secrets", modes="D700,F600")
    there = hosts.home(hosts.addresses[0]) / "odmoe" / "secrets"
    assert stat.S_IMODE((there / "manifest.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    assert [path.name for path in there.iterdir()] == ["manifest.json"]


def test_a_full_disk_is_named(hosts: SshHosts, ssh: Ssh, source: Path, small_disk: Callable[[Path], None]) -> None:
    there = hosts.home(hosts.addresses[0]) / "small"
    small_disk(there)
    with pytest.raises(
        HostError, match=r"main \(127.0.99.1\): the disk is full, ~/small does not fit; make room there"
    ):
        ssh.push(hosts.host, [f"{source}/"], "~/small")


def test_a_copy_cut_short_is_ended_when_the_connections_are(hosts: SshHosts, tmp_path: Path, source: Path) -> None:
    (source / "large").write_bytes(b"\0" * 400_000_000)
    ssh = other(hosts, tmp_path)
    begun = threading.Event()
    failed: list[BaseException] = []

    def copy() -> None:
        try:
            ssh.push(hosts.host, [f"{source}/"], "~/cut", progress=lambda *_: begun.set())
        except HostError as error:
            failed.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    assert begun.wait(HANG_S)
    ssh.close()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert failed


@pytest.fixture
def small_disk() -> Any:
    made: list[Path] = []

    def make(path: Path) -> None:
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, timeout=20)
        if done.returncode:
            pytest.skip("a small disk can be made by root only")
        made.append(path)

    yield make
    for path in made:
        subprocess.run(["umount", "-l", path], check=True, timeout=20)
        path.rmdir()
