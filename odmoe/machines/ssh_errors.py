"""Turns a failure of ssh or rsync into one error with the machine, the cause and advice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from odmoe.machines.cluster_file import Host
from scheduler.errors import ConfigError, HostError

SHOWN = 100  # characters of a command


@dataclass(frozen=True, slots=True)
class Door:
    """ssh's user, key, port and known hosts for one cluster."""

    user: str
    key: Path | None
    known_hosts: Path
    port: int

    def known_as(self, host: Host) -> str:
        """The host's name in a file of known hosts."""
        return host.address if self.port == 22 else f"[{host.address}]:{self.port}"


_CAUSES = (
    (
        r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
        "its host key is not the one that it first had",
        "if the machine was reinstalled, remove the old key: ssh-keygen -f {known} -R '{name}'; if it was not, "
        "another machine answers at this address",
    ),
    (
        r"UNPROTECTED PRIVATE KEY|bad permissions",
        "ssh does not use the key {key}, since others can read it",
        "chmod 600 {key}",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "it does not accept the key {key} for the user {user}",
        "let the key in: ssh-copy-id -i {key} -p {port} {user}@{address}; a key with a passphrase must be in ssh-agent",
    ),
    (
        r"Connection refused",
        "ssh is refused at port {port}",
        "start sshd there, or correct the address in the cluster file",
    ),
    (
        r"No route to host|Network is unreachable|Could not resolve",
        "there is no route to it",
        "see that it is switched on, that its cable is in and that the address in the cluster file is right",
    ),
    (
        r"timed out|not responding",
        "it does not answer ssh",
        "see that it is switched on, that its cable is in and that no firewall is in between",
    ),
    (
        r"Connection (closed|reset)|kex_exchange|Broken pipe|closed by remote|connection unexpectedly closed",
        "it closed the ssh connection",
        "see the log of its sshd: journalctl -u ssh",
    ),
)


def exit_error(door: Door, host: Host, command: str, code: int, stderr: str, said: str) -> HostError:
    """The error of a command's nonzero exit code. `stderr` is the command's. `said` is ssh's own, whose failures have
    the exit code 255."""
    last = _last(stderr)
    if code == 255:
        if known := _connection_error(door, host, said):
            return known
        if said.strip() or not last:
            why = _last(said) or "ssh says no more"
            return _error(host, f"the ssh connection ended: {why}", "see that it runs, and the log of its sshd")
    if code == 127:
        missing = re.search(r"(\S+): (?:command )?not found", stderr)
        what = missing[1].rstrip(":") if missing else _short(command)
        return _error(host, f"there is no command {what}", f"install {_package(what)} there")
    if code < 0:
        return _error(host, f"`{_short(command)}` was ended here by signal {-code}", "try again")
    return _error(host, f"`{_short(command)}` ended with exit code {code}: {last or 'no message'}", "see there")


def copy_failed(door: Door, host: Host, target: str, code: int, stderr: str, said: str, idle_s: float) -> HostError:
    """The error of rsync's nonzero exit code. `said` is what ssh said."""
    if code in (12, 255) and (known := _connection_error(door, host, said) or _connection_error(door, host, stderr)):
        return known
    if code in (12, 127) and re.search(r"rsync: .*not found|not found.*rsync", stderr):
        return _error(host, "there is no command rsync", "install it there: apt-get install rsync")
    if "No space left" in stderr or "Disk quota exceeded" in stderr:
        return _error(host, f"the disk is full, {target} does not fit", "make room there")
    if "Permission denied" in stderr or "Read-only file system" in stderr or "Operation not permitted" in stderr:
        fault = next((line for line in stderr.splitlines() if re.search("denied|Read-only|not permitted", line)), "")
        return _error(host, f"{target} cannot be written: {fault.strip()}", f"make it belong to {door.user}")
    if code in (30, 35):
        return _error(
            host,
            f"the copy to {target} stood still for {idle_s:g} s",
            "see the link, and run it again: it goes on where it stopped",
        )
    return _error(host, f"the copy to {target} ended with rsync's exit code {code}: {_first(stderr)}", "run it again")


def no_end(door: Door, host: Host, command: str, deadline_s: float) -> HostError:
    return _error(
        host, f"`{_short(command)}` had not ended after {deadline_s:.0f} s", "see how busy the machine and its link are"
    )


def no_program(name: str, error: OSError) -> ConfigError:
    return ConfigError(f"{name} cannot be started on this machine ({error.strerror}); install {_package(name)}")


def _connection_error(door: Door, host: Host, stderr: str) -> HostError | None:
    """The error of ssh itself, or None."""
    words = {
        "user": door.user,
        "key": door.key or "that ssh has by itself",
        "port": door.port,
        "address": host.address,
        "known": door.known_hosts,
        "name": door.known_as(host),
    }
    for pattern, cause, advice in _CAUSES:
        if re.search(pattern, stderr):
            return _error(host, cause.format(**words), advice.format(**words))
    return None


def _error(host: Host, cause: str, advice: str) -> HostError:
    return HostError(f"{host.name} ({host.address}): {cause}; {advice}")


def _short(command: str) -> str:
    text = " ".join(command.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _lines(stderr: str) -> list[str]:
    return [line.strip() for line in stderr.splitlines() if line.strip()]


def _last(stderr: str) -> str:
    return (_lines(stderr) or [""])[-1]


def _first(stderr: str) -> str:
    return (_lines(stderr) or ["no message"])[0]


def _package(command: str) -> str:
    return {"ssh": "openssh-client", "python3": "Python 3.11 or newer"}.get(command, command)
