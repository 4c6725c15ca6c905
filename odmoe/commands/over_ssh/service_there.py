"""A service on a cluster's main host, which this process has started over ssh."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from odmoe.commands.over_ssh.generate import pass_on
from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.head import AT_HEAD, HERE, HERE_S, SILENT_S
from odmoe.machines.home import cluster_dir
from odmoe.machines.ssh import Ssh
from odmoe.machines.ssh_process import Remote
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.derived import HERE_ONLY
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.terminal import Output
from scheduler.errors import HostError

GRACE_S = 30.0
"""What the service has to end when nobody can reach it any more: this process has, or the connection."""
CHECK_S = 10.0
THERE = "127.0.0.1:0"
OnServing = Callable[[str, Path], None]
"""Told the model's name, and the socket of this machine that leads to the service."""


class ServiceThere:
    """Its process there, and the connection to it. Made by `started_there`."""

    def __init__(self, cluster: ClusterFile, ssh: Ssh, remote: Remote) -> None:
        self.remote = remote
        self._cluster, self._ssh = cluster, ssh

    def follow(self, on_serving: OnServing) -> tuple[int, str]:
        """Until the service ends, while its log goes to standard error. Returns its exit code and the last 4,000 bytes
        of the log. Raises HostError, and OSError if the log cannot be written here: the service would wait for room
        in the pipe for ever."""
        said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        stderr, broken = bytearray(), list[OSError]()

        def listen() -> None:
            for line in self.remote.stdout:
                said.put(line)
            said.put(None)

        threads = [
            threading.Thread(target=listen, daemon=True),
            threading.Thread(target=pass_on, args=(self.remote.stderr, sys.stderr, broken, stderr), daemon=True),
        ]
        for thread in threads:
            thread.start()
        while (line := self._next(said, broken)) is not None:
            if (serving := _parse_announcement(line)) is not None:
                on_serving(serving["name"], self._ssh.forward(self._cluster.main, serving["port"]))
        threads[1].join(CHECK_S)
        try:
            code = self.remote.process.wait(CHECK_S)
        except subprocess.TimeoutExpired:
            raise HostError(f"{self._host}: its output has ended, but ssh to it has not for {CHECK_S:g} s") from None
        return code, stderr[-4000:].decode(errors="replace")

    def lost_error(self, code: int, stderr: str) -> HostError | None:
        """Why the service was lost; None for one that has ended by itself. `code`, `stderr`: of `follow`."""
        if code == 255 or code < 0:
            return self.remote.failure(code, stderr)
        if code <= 128:
            return None
        number = code - 128
        if number == signal.SIGINT:
            return HostError(
                f"{self._host}: the service there has heard nothing of this machine for {SILENT_S:g} s, and ended"
            )
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        return HostError(f"{self._host}: the service there was ended by {name}; see dmesg there for want of memory")

    @property
    def _host(self) -> str:
        return f"{self._cluster.main.name} ({self._cluster.main.address})"

    def _next(self, said: queue.SimpleQueue[bytes | None], broken: list[OSError]) -> bytes | None:
        """The next line of the service. Meanwhile it hears that this process is there."""
        told = time.monotonic()
        while not broken:
            with contextlib.suppress(queue.Empty):
                return said.get(timeout=0.2)  # without a limit it would hold up signals
            if time.monotonic() - told > HERE_S:
                told = time.monotonic()
                self.remote.send(HERE)
        raise broken[0]


@contextlib.contextmanager
def started_there(cluster: ClusterFile) -> Iterator[ServiceThere]:
    """A process on the main host until the block ends, which waits for a line of `request_of`. Raises HostError."""
    with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
        remote = ssh.start(cluster.main, AT_HEAD, GRACE_S)
        try:
            yield ServiceThere(cluster, ssh, remote)
        finally:
            remote.close(GRACE_S)


def request_of(settings: Settings, own: ServeSettings, keys: Sequence[ApiKey], output: Output) -> str:
    """The line that `odmoe.at_head` reads."""
    given = settings.model_dump(mode="json", exclude_unset=True)
    mine = own.model_dump(mode="json", exclude_unset=True, exclude={"api_key", "api_key_file"})
    if settings.model:
        mine.setdefault("model_name", (Path(settings.model.rstrip("/")).name,))
    request = {
        "do": "serve",
        "settings": {name: value for name, value in given.items() if name not in HERE_ONLY},
        "service": {**mine, "bind": THERE},
        "keys": list(map(asdict, keys)),
        "output": asdict(output),
    }
    return json.dumps(request) + "\n"


def _parse_announcement(line: bytes) -> dict[str, Any] | None:
    """Name and port of the service. None for a line of a library."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"name", "port"} <= found.keys() else None
