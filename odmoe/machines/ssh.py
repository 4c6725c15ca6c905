"""Other machines, by OpenSSH and rsync: a command, a stream, a copy. Every wait has a bound, every failure a name."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.ssh_errors import Door, copy_failed, no_end, no_program, refused
from odmoe.machines.ssh_process import LEASH, Remote
from scheduler.errors import ConfigError, HostError

PORT = 22
CONNECT_S = 10
ALIVE_S = 5  # between two signs of life of a connection; three that are missed end it
IDLE_S = 30  # longest pause of a copy
SLOWEST = 250_000  # bytes a second below which a copy is given up
AT_ONCE = 32
T = TypeVar("T")
Progress = Callable[[int, int], None]


class Ssh:
    """The connections of one cluster: one to each host, shared by all that goes there, until `close`."""

    def __init__(self, user: str, key: Path | None, known_hosts: Path, port: int | None = None) -> None:
        """`known_hosts`: the cluster's own file; a host's key is taken on first sight and held to from then on.

        Raises ConfigError: the key is not there.
        """
        if key is not None and not key.is_file():
            raise ConfigError(f"the ssh key {key} is not there; make one: ssh-keygen -t ed25519 -f {key}")
        self.door = Door(user, key, known_hosts, port or PORT)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._changing = threading.Lock()
        self._closed = False
        known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        known_hosts.touch(mode=0o600)
        self._sockets = _short_directory()

    @classmethod
    def of(cls, cluster: ClusterFile, folder: Path) -> Ssh:
        """As a cluster file says. `folder`: what this machine keeps of the cluster. Raises ConfigError."""
        return cls(cluster.user, cluster.key, folder / "known_hosts")

    def __enter__(self) -> Ssh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, host: Host, command: str, deadline_s: float, data: bytes | None = None) -> str:
        """What a shell command there writes to standard output; `data` is its standard input. Raises HostError.

        After `deadline_s` it is ended, there as well.
        """
        there = f"timeout -k 5 {math.ceil(deadline_s)} sh -c {shlex.quote(command)}"
        code, out, stderr = self._finish(host, self._ssh(host, there), deadline_s + 1, data, command)
        if code == 124:
            raise no_end(self.door, host, command, deadline_s)
        if code != 0:
            raise refused(self.door, host, command, code, stderr)
        return out

    def start(self, host: Host, command: str, grace_s: float = 5.0) -> Remote:
        """A command there whose streams are pipes here. When its standard input ends, be it that this process is gone,
        it has `grace_s` to end by itself. Needs python3 there. Raises HostError."""
        words = ["python3", "-c", LEASH, f"{grace_s:g}", command]
        process = self._spawn(host, self._ssh(host, shlex.join(words)), subprocess.PIPE)
        return Remote(process, lambda code, stderr: refused(self.door, host, command, code, stderr), self._forget)

    def push(
        self,
        host: Host,
        sources: Sequence[Path | str],
        target: str,
        *,
        delete: bool = False,
        last: str | None = None,
        modes: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy files, and what is in directories that end in `/`, to the directory `target` there; what is there
        already is kept, a copy that was cut short is taken up again. Raises HostError.

        `delete`: what the sources do not have. `last`: a file that is copied when all others are there. `modes`: as
        chmod takes them. `progress(done, total)`: bytes.
        """
        total = size_of(sources)
        options = ["--delete"] if delete else []
        options += [f"--chmod={modes}"] if modes else []
        self.run(host, f"mkdir -p -m 700 {_beneath_home(target)}", 20)
        step = (lambda done: progress(min(done, total), total)) if progress else None
        turns = [[f"--exclude=/{last}"], []] if last else [[]]
        for turn in turns:
            self._copy(host, [*options, *turn, "--", *map(str, sources)], target, total, step)
            step = None
        if progress:
            progress(total, total)

    def each(self, hosts: Iterable[Host], job: Callable[[Host], T], at_once: int = AT_ONCE) -> dict[str, T | HostError]:
        """`job` for every host, some at a time: by address what it gave, or how it failed."""

        def one(host: Host) -> T | HostError:
            try:
                return job(host)
            except HostError as error:
                return error

        hosts = list(hosts)
        with ThreadPoolExecutor(min(at_once, len(hosts) or 1)) as pool:
            try:
                return dict(zip((host.address for host in hosts), pool.map(one, hosts), strict=True))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise

    def close(self) -> None:
        """End everything that runs, and the connections."""
        with self._changing:
            running, self._closed = list(self._running), True
        for process in running:
            _kill(process)
        for socket in self._sockets.glob("*"):
            end = ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "-l", self.door.user, "--", "host"]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(end, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def options(self) -> list[str]:
        """Of ssh, less the host."""
        door = self.door
        options = {
            "BatchMode": "yes", "ConnectTimeout": CONNECT_S, "ConnectionAttempts": 1, "ServerAliveInterval": ALIVE_S,
            "ServerAliveCountMax": 3, "StrictHostKeyChecking": "accept-new", "LogLevel": "ERROR", "ForwardAgent": "no",
            "UserKnownHostsFile": '"{}"'.format(str(door.known_hosts).replace("%", "%%")), "ForwardX11": "no",
            "ControlMaster": "auto", "ControlPath": f"{self._sockets}/%C", "ControlPersist": 60, "Port": door.port,
        }  # fmt: skip
        if door.key:
            options |= {"IdentitiesOnly": "yes", "IdentityFile": '"{}"'.format(str(door.key).replace("%", "%%"))}
        return [*(part for name, value in options.items() for part in ("-o", f"{name}={value}")), "-l", door.user]

    def _ssh(self, host: Host, command: str) -> list[str]:
        return ["ssh", "-T", *self.options(), "--", host.address, command]

    def _copy(self, host: Host, what: list[str], target: str, total: int, step: Callable[[int], None] | None) -> None:
        shell = shlex.join(["ssh", *self.options()])
        command = [
            "rsync", "-rlpt", "--partial", f"--timeout={IDLE_S}", "--info=progress2", "--no-human-readable",
            "-e", shell, *what, f"{host.address}:{target}/",
        ]  # fmt: skip
        bound = 2 * IDLE_S + total / SLOWEST
        code, _, stderr = self._finish(host, command, bound, None, f"a copy to {target}", step)
        if code != 0:
            raise copy_failed(self.door, host, target, code, stderr, IDLE_S)

    def _finish(
        self,
        host: Host,
        command: list[str],
        deadline_s: float,
        data: bytes | None,
        named: str,
        step: Callable[[int], None] | None = None,
    ) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) of a program here. Raises HostError at the deadline."""
        process = self._spawn(host, command, subprocess.DEVNULL if data is None else subprocess.PIPE)
        try:
            watcher = _watch(process.stdout, step) if step and process.stdout else None
            if watcher:
                process.stdout = None
            out, stderr = process.communicate(data, timeout=deadline_s)
            return process.returncode, (out or b"").decode(errors="replace"), stderr.decode(errors="replace")
        except subprocess.TimeoutExpired:
            raise no_end(self.door, host, named, deadline_s) from None
        finally:
            _kill(process)
            self._forget(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _spawn(self, host: Host, command: list[str], stdin: int) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C is for this process, which then ends them in order."""
        environment = os.environ | {"LC_ALL": "C"}
        try:
            with self._changing:
                if self._closed:
                    raise HostError(f"{host.name} ({host.address}): not asked, since this command is ending")
                process = subprocess.Popen(
                    command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                    start_new_session=True,
                )  # fmt: skip
                self._running.add(process)
        except OSError as error:
            raise no_program(command[0], error) from error
        return process

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        with self._changing:
            self._running.discard(process)


def size_of(sources: Sequence[Path | str]) -> int:
    """Bytes of files, and of all that is in directories. Raises ConfigError: one is not there."""
    total = 0
    for source in map(Path, sources):
        if not source.exists():
            raise ConfigError(f"{source} is not there, to be copied to the hosts")
        files = source.rglob("*") if source.is_dir() else [source]
        total += sum(file.stat().st_size for file in files if file.is_file())
    return total


def _beneath_home(path: str) -> str:
    """`~/a b` as a shell there takes it."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def _watch(stream: IO[bytes], step: Callable[[int], None]) -> threading.Thread:
    """Tell `step` the bytes that rsync says it has come to."""

    def follow() -> None:
        with contextlib.suppress(OSError, ValueError), stream:
            while chunk := stream.read1(4096):  # type: ignore[attr-defined]
                if found := re.findall(rb"(\d+) +\d+%", chunk):
                    step(int(found[-1]))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The program and what it started."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _short_directory() -> Path:
    """Where a socket's whole name stays below the 108 bytes that it may have."""
    for base in (tempfile.gettempdir(), "/tmp"):
        if len(base) <= 25:
            return Path(tempfile.mkdtemp(prefix="odmoe-", dir=base))
    raise ConfigError(f"{tempfile.gettempdir()} is too long for sockets, and /tmp cannot be written; set TMPDIR")
