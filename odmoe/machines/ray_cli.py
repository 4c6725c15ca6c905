"""Runs `ray up` and `ray down` with a deadline, logs their output, and finds the cause of a failure in it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.home import token_file
from odmoe.machines.ssh import Ssh
from scheduler.errors import HostError, LaunchError

RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The command `ray`. Its own script need not lie beside the interpreter: pip puts it elsewhere for a single user."""
LOG_S = 20.0
LOG_BYTES = 400_000
RECENT_MIN = 15
LOGS = "/tmp/ray/session_latest/logs"
TELLING = re.compile(
    r"error|fail|refused|denied|not found|no such|no space|cannot|timed out|unable|unreachable|mismatch", re.IGNORECASE
)
GRAVE = re.compile(r"^\[\S+ \S+ [ECF] ")
"""A line of Ray's own log, of the levels error, critical and fatal."""
NOISE = re.compile(
    r"Traceback|^\s*(File|raise|return|at)\b|\(reraise|usage_lib|^\s*[\^~]+\s*$|Full command is|Running `|"
    r"SSH command failed|Failed to setup head node|New status|Exception details|bashrc|PS1: unbound"
)
"""Lines that follow every failure and do not explain it."""

PLAIN = (
    (
        re.compile(r"Timed out waiting for file \S*(?:agent|export)\S*_port"),
        "Ray's agent there took longer than the 15 s that Ray gives it; start Ray as the project's cluster.yaml does, "
        "by python -m odmoe.on_ray.ray_start, which starts none",
    ),
    (
        re.compile(r"timed out during startup"),
        "Ray took longer to start there than the 30 s that it allows itself; see how busy that host is, then try again",
    ),
)
"""What Ray says in terms of its own code, and what it means."""


def run_ray(cluster: ClusterFile, folder: Path, verb: str, deadline_s: float, show: Callable[[str], None]) -> str:
    """Run `ray up` or `ray down` for a cluster file. Returns its output, which also goes line by line to `show` and to
    ray-<verb>.log in `folder`. Raises LaunchError if it fails or has not ended after `deadline_s`."""
    command = [*RAY, verb, "-y", *(["--no-config-cache"] if verb == "up" else []), str(cluster.path)]
    log = folder / f"ray-{verb}.log"
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file(folder)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise LaunchError(f"{RAY[0]} cannot be started ({error.strerror}); make env makes it") from error
    lines: list[str] = []

    def follow() -> None:
        with contextlib.suppress(OSError, ValueError), log.open("w") as file:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                file.write(line)
                file.flush()
                show(lines[-1])

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        code = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"ray {verb} had not ended after {deadline_s:.0f} s: {telling(lines)}; see {log}") from None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)
        reader.join(5)
    if code != 0:
        raise LaunchError(f"ray {verb} ended with exit code {code}: {telling(lines)}; see {log}")
    return "\n".join(lines)


def telling(lines: list[str], most: int = 2) -> str:
    """The last lines that explain the failure; the very last one if none does."""
    known = list(dict.fromkeys(_bare(line) for line in lines if line.strip() and not NOISE.search(line)))
    found = [line for line in known if TELLING.search(line)][-most:] or known[-1:]
    return " / ".join(found) or "no message"


def ray_says(ssh: Ssh, head: Host, missing: list[Host]) -> dict[str, str]:
    """Why Ray has not joined on each of `missing`, by address: from its log on that host, or the launcher's log on the
    head. Hosts that do not answer are left out."""
    command = (
        f"find {LOGS}/ -name 'raylet.[oe]*' -mmin -{RECENT_MIN} -exec tail -qc {LOG_BYTES} {{}} + 2>/dev/null || true"
    )
    own = ssh.each(missing, lambda host: ssh.run(host, command, LOG_S).splitlines())
    launcher = _monitor(ssh, head) if missing else []
    found = {}
    for host in missing:
        lines = own[host.address]
        faults = [line for line in lines if GRAVE.search(line)] if isinstance(lines, list) else []
        named = re.compile(rf"(?<![\d.]){re.escape(host.address)}(?![\d.])")
        found_lines = [
            line for line in launcher if named.search(line) and TELLING.search(line) and not NOISE.search(line)
        ]
        if faults or found_lines:
            found[host.address] = telling(faults or found_lines, 1)
    return found


def _monitor(ssh: Ssh, head: Host) -> list[str]:
    """The launcher's log on the head. It is about all hosts, so lines without an address are dropped."""
    files = " ".join(f"{LOGS}/monitor.{name}" for name in ("log", "out", "err"))
    command = f"tail -qc {LOG_BYTES} {files} 2>/dev/null || true"
    try:
        return ssh.run(head, command, LOG_S).splitlines()
    except HostError:
        return []


def _bare(line: str) -> str:
    """A log line without colours, time and level."""
    line = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line)
    line = re.sub(r"^\[[^\]]*\] \(\w+\) \S+:\s+(An unexpected system state.*?fix it\.\s+)?", "", line)
    for pattern, meaning in PLAIN:
        if pattern.search(line):
            return meaning
    line = re.sub(r"^\s*(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+)?([A-Z]+ \S+\.py:\d+ --? )?", "", line)
    return " ".join(line.split())[:300]
