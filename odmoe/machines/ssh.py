"""Commands, streams and copies on other machines, by OpenSSH and rsync. Every wait has a deadline."""

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
from odmoe.machines.ssh_errors import Door, copy_failed, exit_error, no_end, no_program
from odmoe.machines.ssh_process import LEASH, Remote
from scheduler.errors import ConfigError, HostError

PORT = 22
CONNECT_S = 10
ALIVE_S = 5  # between two keepalives of a connection; three missed ones end it
IDLE_S = 30  # longest pause of a copy
SLOWEST = 250_000  # bytes a second below which a copy is given up
AT_ONCE = 32
_NO_CAUSE = "Warning: Permanently added"  # said at each first connection
T = TypeVar("T")
Progress = Callable[[int, int], None]


class Ssh:
    """The connections of one cluster until `close`: one to each host, shared by all its commands and copies."""

    def __init__(self, user: str, key: Path | None, known_hosts: Path, port: int | None = None) -> None:
        """`known_hosts` is the cluster's own file. A host's key is trusted on first use and must not change later.

        Raises ConfigError if `key` does not exist.
        """
        if key is not None and not key.is_file():
            raise ConfigError(f"the ssh key {key} is not there; make one: ssh-keygen -t ed25519 -N '' -f {key}")
        self.door = Door(user, key, known_hosts, port or PORT)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._changing = threading.Lock()
        self._closed = False
        known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        known_hosts.touch(mode=0o600)
        self._sockets = _short_directory()
        self._logs = Path(tempfile.mkdtemp(prefix="odmoe-ssh-"))

    @classmethod
    def for_cluster(cls, cluster: ClusterFile, folder: Path) -> Ssh:
        """For a cluster file. `folder` is this machine's directory of the cluster. Raises ConfigError."""
        return cls(cluster.user, cluster.key, folder / "known_hosts")

    def __enter__(self) -> Ssh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, host: Host, command: str, deadline_s: float, data: bytes | None = None) -> str:
        """Run a shell command on a host with `data` as standard input. Returns its standard output. Raises HostError.

        After `deadline_s` it is ended, on the host, too.
        """
        there = f"timeout -k 5 {math.ceil(deadline_s)} sh -c {shlex.quote(command)}"
        said = self._log_reader(host)
        code, out, stderr = self._finish(host, self._ssh(host, there), deadline_s + 1, data, command)
        if code == 124:
            raise no_end(self.door, host, command, deadline_s)
        if code != 0:
            raise exit_error(self.door, host, command, code, stderr, said())
        return out

    def start(self, host: Host, command: str, grace_s: float = 5.0) -> Remote:
        """Start a command on a host with its streams as pipes here. When its standard input ends, or this process dies,
        it has `grace_s` to exit. The host needs python3. Raises HostError."""
        words, said = ["python3", "-c", LEASH, f"{grace_s:g}", command], self._log_reader(host)
        process = self._spawn(host, self._ssh(host, shlex.join(words)), subprocess.PIPE)

        def to_error(code: int, stderr: str) -> HostError:
            return exit_error(self.door, host, command, code, stderr, said())

        return Remote(process, to_error, self._forget)

    def forward(self, host: Host, there: int) -> Path:
        """Pass connections to a socket of this machine on to a port of the host's loopback, until `close`. Returns the
        socket's path. Something must be running on the host (`start`). Raises HostError."""
        here, said = self._sockets / f"{there}", self._log_reader(host)
        asked = f"{here}:127.0.0.1:{there}"
        command = ["ssh", *self.options(), *self._log(host), "-O", "forward", "-L", asked, "--", host.address]
        code, _, stderr = self._finish(host, command, CONNECT_S, None, f"forwarding {asked}")
        if code != 0:
            raise exit_error(self.door, host, f"forwarding {asked}", code, stderr, said())
        return here

    def push(
        self,
        host: Host,
        sources: Sequence[Path | str],
        target: str,
        *,
        delete: bool = False,
        last: str | None = None,
        modes: str | None = None,
        together: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Copy files, and the content of directories that end in `/`, to the directory `target` on a host. Equal files
        are skipped; an interrupted copy continues. Raises HostError.

        `delete` removes files that the sources do not have. `last` is a file to copy after all others. `modes` are
        chmod's. With `together` files take their places when all have come. `progress(done, total)` is in bytes.
        """
        total = size_of(sources)
        options = ["--delete"] if delete else []
        options += [f"--chmod={modes}"] if modes else []
        options += ["--delay-updates"] if together else []
        self.run(host, f"mkdir -p -m 700 {_beneath_home(target)}", 20)
        step = (lambda done: progress(min(done, total), total)) if progress else None
        turns = [[f"--exclude=/{last}"], []] if last else [[]]
        for turn in turns:
            self._copy(host, [*options, *turn, "--", *map(str, sources)], target, total, step)
            step = None
        if progress:
            progress(total, total)

    def each(self, hosts: Iterable[Host], job: Callable[[Host], T], at_once: int = AT_ONCE) -> dict[str, T | HostError]:
        """Run `job` for every host, some at a time. Returns results or errors by address."""

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
        """End all running commands and the connections."""
        with self._changing:
            running, self._closed = list(self._running), True
        for process in running:
            _kill(process)
        for socket in self._sockets.glob("*"):
            end = ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "-l", self.door.user, "--", "host"]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(end, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False)
        shutil.rmtree(self._sockets, ignore_errors=True)
        shutil.rmtree(self._logs, ignore_errors=True)

    def options(self) -> list[str]:
        """Options of ssh, without the host."""
        door = self.door
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": CONNECT_S,
            "ConnectionAttempts": 1,
            "ServerAliveInterval": ALIVE_S,
            "ServerAliveCountMax": 3,
            "StrictHostKeyChecking": "accept-new",
            "LogLevel": "INFO",  # below it, ssh does not say that a host has fallen silent
            "ForwardAgent": "no",
            "UserKnownHostsFile": '"{}"'.format(str(door.known_hosts).replace("%", "%%")),
            "ForwardX11": "no",
            "ControlMaster": "auto",
            "ControlPath": f"{self._sockets}/%C",
            "ControlPersist": 60,
            "Port": door.port,
        }
        if door.key:
            options |= {"IdentitiesOnly": "yes", "IdentityFile": '"{}"'.format(str(door.key).replace("%", "%%"))}
        return [*(part for name, value in options.items() for part in ("-o", f"{name}={value}")), "-l", door.user]

    def _ssh(self, host: Host, command: str) -> list[str]:
        return ["ssh", "-T", *self.options(), *self._log(host), "--", host.address, command]

    def _log(self, host: Host) -> list[str]:
        """Have ssh write what it says itself into a file: on standard error it would be among the host's own lines."""
        return ["-E", str(self._logs / host.address)]

    def _log_reader(self, host: Host) -> Callable[[], str]:
        """What ssh has said about a host from now on."""
        log = self._logs / host.address
        begun = log.stat().st_size if log.exists() else 0

        def read_log() -> str:
            text = log.read_bytes()[begun:].decode(errors="replace") if log.exists() else ""
            return "".join(line for line in text.splitlines(True) if not line.startswith(_NO_CAUSE))

        return read_log

    def _copy(self, host: Host, what: list[str], target: str, total: int, step: Callable[[int], None] | None) -> None:
        shell, said = shlex.join(["ssh", *self.options(), *self._log(host)]), self._log_reader(host)
        command = [
            "rsync",
            "-rlpt",
            "--partial",
            f"--timeout={IDLE_S}",
            "--info=progress2",
            "--no-human-readable",
            "-e",
            shell,
            *what,
            f"{host.address}:{target}/",
        ]
        bound = 2 * IDLE_S + total / SLOWEST
        code, _, stderr = self._finish(host, command, bound, None, f"a copy to {target}", step)
        if code != 0:
            raise copy_failed(self.door, host, target, code, stderr, said(), IDLE_S)

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
        """Start a program in its own session, so that Ctrl-C reaches only this process, which ends them in order."""
        environment = os.environ | {"LC_ALL": "C"}
        try:
            with self._changing:
                if self._closed:
                    raise HostError(f"{host.name} ({host.address}): not asked, since this command is ending")
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
                self._running.add(process)
        except OSError as error:
            raise no_program(command[0], error) from error
        return process

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        with self._changing:
            self._running.discard(process)


def size_of(sources: Sequence[Path | str]) -> int:
    """Bytes of files and of the content of directories. Raises ConfigError if one does not exist."""
    total = 0
    for source in map(Path, sources):
        if not source.exists():
            raise ConfigError(f"{source} is not there, to be copied to the hosts")
        files = source.rglob("*") if source.is_dir() else [source]
        total += sum(file.stat().st_size for file in files if file.is_file())
    return total


def _beneath_home(path: str) -> str:
    """Quote `~/a b` for the host's shell."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def _watch(stream: IO[bytes], step: Callable[[int], None]) -> threading.Thread:
    """Pass rsync's progress in bytes to `step`."""

    def follow() -> None:
        with contextlib.suppress(OSError, ValueError), stream:
            while chunk := stream.read1(4096):  # type: ignore[attr-defined]
                if found := re.findall(rb"(\d+) +\d+%", chunk):
                    step(int(found[-1]))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its children."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _short_directory() -> Path:
    """A directory in which a socket's path stays below its limit of 108 bytes."""
    for base in (tempfile.gettempdir(), "/tmp"):
        if len(base) <= 25:
            return Path(tempfile.mkdtemp(prefix="odmoe-", dir=base))
    raise ConfigError(f"{tempfile.gettempdir()} is too long for sockets, and /tmp cannot be written; set TMPDIR")
