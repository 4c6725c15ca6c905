"""`odmoe serve --cluster FILE`: the service runs on the cluster's main host, and its port is here, over ssh."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from odmoe.api.checks import check_early
from odmoe.commands.generate_remote import bring_up, pass_on
from odmoe.machines.cluster_file import ClusterFile, read_cluster_file
from odmoe.machines.head import AT_HEAD, HERE_ONLY
from odmoe.machines.home import cluster_dir
from odmoe.machines.ssh import Ssh
from odmoe.machines.ssh_process import Remote
from odmoe.serve.start import bound, url_of
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.terminal import Output, Terminal
from scheduler.errors import HostError

GRACE_S = 30.0
"""What the service has to end when nobody can reach it any more: this process has, or the connection."""
CHECK_S = 10.0
STOP = b"stop\n"
"""A line for the main host: as a signal that came here."""
THERE = "127.0.0.1:0"


def serve_there(settings: Settings, own: ServeSettings, keys: tuple[str, ...], output: Output) -> int:
    """Serve until a signal comes. Returns the main host's exit code. Raises HostError, ConfigError."""
    file = Path(settings.cluster)
    cluster = read_cluster_file(file)
    check_early(settings)
    with contextlib.closing(bound(own)) as listening:  # an address in use is told before anything is started
        here = listening.getsockname()[:2]
        bring_up(settings, cluster, output)
    with Ssh.of(cluster, cluster_dir(cluster.name)) as ssh:
        remote = ssh.start(cluster.main, AT_HEAD, GRACE_S)
        try:
            remote.send(json.dumps(_request(settings, own, keys, output)) + "\n")
            with _signals(remote) as signals:
                code, stderr = _follow(ssh, cluster, remote, here, Terminal(output.quiet, output.debug))
        finally:
            remote.close(GRACE_S)
    if code == 255:
        raise remote.failure(code, stderr)
    return 128 + signals[-1] if code == 128 + signal.SIGINT and signals else code


def _request(settings: Settings, own: ServeSettings, keys: tuple[str, ...], output: Output) -> dict[str, Any]:
    """What `odmoe.cli.at_head` reads."""
    given = settings.model_dump(mode="json", exclude_unset=True)
    mine = own.model_dump(mode="json", exclude_unset=True, exclude={"api_key", "api_key_file"})
    if settings.model:
        mine.setdefault("model_name", Path(settings.model.rstrip("/")).name)
    return {
        "do": "serve",
        "settings": {name: value for name, value in given.items() if name not in HERE_ONLY},
        "service": {**mine, "bind": THERE},
        "keys": keys,
        "output": asdict(output),
    }


@contextlib.contextmanager
def _signals(remote: Remote) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are passed on; the numbers of those that came."""
    came: list[int] = []

    def pass_signal(number: int, frame: FrameType | None) -> None:
        came.append(number)
        with contextlib.suppress(OSError):  # it has ended
            os.write(remote.stdin.fileno(), STOP)  # a signal may come while another one is passed on

    before = {number: signal.signal(number, pass_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(
    ssh: Ssh, cluster: ClusterFile, remote: Remote, here: tuple[str, int], terminal: Terminal
) -> tuple[int, str]:
    """Until the service ends. Returns its exit code and the last 4,000 bytes of its standard error.

    Raises HostError, and OSError where its log cannot be written here: it would wait for room in the pipe for ever.
    """
    said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    stderr, broken = bytearray(), list[OSError]()

    def listen() -> None:
        for line in remote.stdout:
            said.put(line)
        said.put(None)

    threads = [
        threading.Thread(target=listen, daemon=True),
        threading.Thread(target=pass_on, args=(remote.stderr, sys.stderr, broken, stderr), daemon=True),
    ]
    for thread in threads:
        thread.start()
    while (line := _next(said, broken)) is not None:
        serving = _announced(line)
        if serving is None:
            continue
        ssh.forward(cluster.main, here, serving["port"])
        _check(here, cluster)
        terminal.complain(f"serving {serving['name']} at {url_of(here)}")
    threads[1].join(CHECK_S)
    return remote.process.wait(CHECK_S), stderr[-4000:].decode(errors="replace")


def _next(said: queue.SimpleQueue[bytes | None], broken: list[OSError]) -> bytes | None:
    while not broken:
        with contextlib.suppress(queue.Empty):
            return said.get(timeout=0.2)  # without a limit it would hold up signals
    raise broken[0]


def _announced(line: bytes) -> dict[str, Any] | None:
    """Name and port of the service. None for a line of a library."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"name", "port"} <= found.keys() else None


def _check(here: tuple[str, int], cluster: ClusterFile) -> None:
    """Raises HostError where the main host takes no connections from here: its sshd may forbid it."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(here[0], here[0])
    with contextlib.closing(http.client.HTTPConnection(address, here[1], timeout=CHECK_S)) as connection:
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException) as error:
            raise HostError(
                f"{cluster.main.name} ({cluster.main.address}): the service there does not answer over ssh ({error}); "
                "set AllowTcpForwarding yes for its sshd, or run odmoe serve --cluster auto there"
            ) from error
    raise HostError(f"{cluster.main.name}: another program answers at {url_of(here)}")
