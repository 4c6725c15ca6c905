"""`odmoe serve --cluster FILE`: the service runs on the cluster's main host, and its port is here, over ssh."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from odmoe.api.checks import check_early
from odmoe.commands.over_ssh.generate import bring_up, pass_on
from odmoe.commands.over_ssh.relay import Relay
from odmoe.log_thread import utc_time
from odmoe.machines.cluster_file import ClusterFile, read_cluster_file
from odmoe.machines.head import AT_HEAD, HERE, HERE_S, KEYS, SILENT_S, STOP
from odmoe.machines.home import cluster_dir
from odmoe.machines.ssh import Ssh
from odmoe.machines.ssh_process import Remote
from odmoe.serve.access_log import as_text
from odmoe.serve.hangup import on_hangup, read_keys_again
from odmoe.serve.key_ring import KeyRing
from odmoe.serve.loading import LoadingServer, LoadProgress
from odmoe.serve.start import bind_socket, url_of
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.derived import HERE_ONLY
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.terminal import Output, Terminal
from scheduler.errors import HostError, LaunchError

GRACE_S = 30.0
"""What the service has to end when nobody can reach it any more: this process has, or the connection."""
CHECK_S = 10.0
AGAIN_S = 2.0
LASTING_S = 60.0
"""A service that was there for so long may be lost as often again."""
THERE = "127.0.0.1:0"


def serve_there(settings: Settings, own: ServeSettings, keys: tuple[ApiKey, ...], output: Output) -> int:
    """Serve until a signal comes. Returns the main host's exit code. If the main host or the service there is lost, it
    is started again, up to `--retry` times, each of which waits `--launch-timeout` for the host.

    Raises HostError, ConfigError.
    """
    cluster = read_cluster_file(Path(settings.cluster))
    check_early(settings)
    terminal = Terminal(output.quiet, output.debug)
    with contextlib.closing(bind_socket(own)) as listening, contextlib.closing(Relay(listening)) as relay:
        progress = LoadProgress("starting the cluster")
        with LoadingServer(listening, progress, lambda line: None, as_text) as loading:
            service = _Service(settings, own, keys, output, relay, terminal, loading)
            with on_hangup(service.read_keys_again):
                bring_up(settings, cluster, output)  # an address in use is told before anything is started
                progress.set("starting the service on the main host")
                return _serve_again(settings, cluster, service, output)


def _serve_again(settings: Settings, cluster: ClusterFile, service: _Service, output: Output) -> int:
    """Until it ends by itself, or was lost once more than `--retry` allows."""
    retry = 0
    while True:
        try:
            if retry:
                _wait_until_back(cluster, settings.launch_s)
                bring_up(settings, cluster, output)
            return service.run(cluster)
        except (HostError, LaunchError) as error:
            if service.lasted_s > LASTING_S:
                retry = 0
            service.lasted_s = 0.0
            if not service.served or retry == settings.retry:
                raise
            retry += 1
            Terminal().print_always(f"{utc_time()} {error}; retry {retry} of {settings.retry}")


class _Service:
    """The service on the main host.

    `served`: it has taken requests at least once. `lasted_s`: for how long the last one that was started did.
    """

    def __init__(
        self,
        settings: Settings,
        own: ServeSettings,
        keys: tuple[ApiKey, ...],
        output: Output,
        relay: Relay,
        terminal: Terminal,
        loading: LoadingServer,
    ) -> None:
        """`loading`: answers until the service does."""
        self._settings, self._output = settings, output
        self._relay, self._terminal, self._loading = relay, terminal, loading
        self._own, self._ring = own, KeyRing(keys)
        self._remote: Remote | None = None
        self.served, self.lasted_s = False, 0.0
        self._since: float | None = None

    def run(self, cluster: ClusterFile) -> int:
        """Until it ends. Returns its exit code. Raises HostError if the main host or the service there was lost, and
        OSError where its log cannot be written here: it would wait for room in the pipe for ever."""
        self._since = None
        with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
            remote = ssh.start(cluster.main, AT_HEAD, GRACE_S)
            try:
                request = _request(self._settings, self._own, self._ring.keys, self._output)
                remote.send(json.dumps(request) + "\n")
                self._remote = remote
                with _signals(remote) as signals:
                    code, stderr = self._follow(ssh, cluster, remote)
            finally:
                self._remote = None
                self._relay.on_lost()
                self.lasted_s = 0.0 if self._since is None else time.monotonic() - self._since
                remote.close(GRACE_S)
            if signals:
                return 128 + signals[-1] if code == 128 + signal.SIGINT else code
            if code == 255 or code < 0:
                raise remote.failure(code, stderr)
            if code > 128:
                raise _killed_error(cluster, code - 128)
            return code

    def read_keys_again(self) -> None:
        """In a thread, when SIGHUP came."""
        read_keys_again(self._own, self._ring, lambda text: self._terminal.print_always(f"{utc_time()} {text}"))
        if (remote := self._remote) is not None:
            remote.send(KEYS + json.dumps([asdict(key) for key in self._ring.keys]) + "\n")

    def _follow(self, ssh: Ssh, cluster: ClusterFile, remote: Remote) -> tuple[int, str]:
        """Until the service ends. Returns its exit code and the last 4,000 bytes of its standard error."""
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
        while (line := _next(said, broken, remote)) is not None:
            if (serving := _parse_announcement(line)) is not None:
                self._loading.close()
                self._relay.lead_to(ssh.forward(cluster.main, serving["port"]))
                _check(self._relay.address, cluster)
                self.served, self._since = True, time.monotonic()
                self._terminal.print_always(f"serving {serving['name']} at {url_of(self._relay.address)}")
        threads[1].join(CHECK_S)
        try:
            code = remote.process.wait(CHECK_S)
        except subprocess.TimeoutExpired:
            host = f"{cluster.main.name} ({cluster.main.address})"
            raise HostError(f"{host}: its output has ended, but ssh to it has not for {CHECK_S:g} s") from None
        return code, stderr[-4000:].decode(errors="replace")


def _killed_error(cluster: ClusterFile, number: int) -> HostError:
    """The error of a service that was ended there by a signal, though none came here."""
    host = f"{cluster.main.name} ({cluster.main.address})"
    if number == signal.SIGINT:
        return HostError(f"{host}: the service there has heard nothing of this machine for {SILENT_S:g} s, and ended")
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return HostError(f"{host}: the service there was ended by {name}; see dmesg there for want of memory")


def _wait_until_back(cluster: ClusterFile, within_s: float) -> None:
    """Until the main host answers ssh. Raises HostError if it does not within that time."""
    end = time.monotonic() + within_s
    while True:
        try:
            with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
                ssh.run(cluster.main, "true", CHECK_S)
                return
        except HostError:
            if time.monotonic() + AGAIN_S >= end:
                raise
        time.sleep(AGAIN_S)


def _request(settings: Settings, own: ServeSettings, keys: tuple[ApiKey, ...], output: Output) -> dict[str, Any]:
    """What `odmoe.at_head` reads."""
    given = settings.model_dump(mode="json", exclude_unset=True)
    mine = own.model_dump(mode="json", exclude_unset=True, exclude={"api_key", "api_key_file"})
    if settings.model:
        mine.setdefault("model_name", (Path(settings.model.rstrip("/")).name,))
    return {
        "do": "serve",
        "settings": {name: value for name, value in given.items() if name not in HERE_ONLY},
        "service": {**mine, "bind": THERE},
        "keys": list(map(asdict, keys)),
        "output": asdict(output),
    }


@contextlib.contextmanager
def _signals(remote: Remote) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are passed on; the numbers of those that came."""
    came: list[int] = []

    def pass_signal(number: int, frame: FrameType | None) -> None:
        came.append(number)
        with contextlib.suppress(OSError):  # it has ended
            os.write(remote.stdin.fileno(), STOP.encode())  # a signal may come while another one is passed on

    before = {number: signal.signal(number, pass_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _next(said: queue.SimpleQueue[bytes | None], broken: list[OSError], remote: Remote) -> bytes | None:
    """The next line of the service. Meanwhile it hears that this process is there."""
    told = time.monotonic()
    while not broken:
        with contextlib.suppress(queue.Empty):
            return said.get(timeout=0.2)  # without a limit it would hold up signals
        if time.monotonic() - told > HERE_S:
            told = time.monotonic()
            remote.send(HERE)
    raise broken[0]


def _parse_announcement(line: bytes) -> dict[str, Any] | None:
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
            if (status := connection.getresponse().status) != 200:
                raise http.client.HTTPException(f"status {status}")
        except (OSError, http.client.HTTPException) as error:
            raise HostError(
                f"{cluster.main.name} ({cluster.main.address}): the service there does not answer over ssh ({error}); "
                "set AllowTcpForwarding yes for its sshd, or run odmoe serve --cluster auto there"
            ) from error
