"""`odmoe serve --cluster FILE`: the service runs on the cluster's main host, and its port is here, over ssh."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType

from odmoe.api.checks import check_early
from odmoe.commands.over_ssh.generate import bring_up
from odmoe.commands.over_ssh.relay import Relay
from odmoe.commands.over_ssh.service_there import CHECK_S, request_of, started_there
from odmoe.log_thread import utc_time
from odmoe.machines.cluster_file import ClusterFile, read_cluster_file
from odmoe.machines.head import KEYS, STOP
from odmoe.machines.home import cluster_dir
from odmoe.machines.ssh import Ssh
from odmoe.machines.ssh_process import Remote
from odmoe.serve.access_log import as_text
from odmoe.serve.hangup import on_hangup, read_keys_again
from odmoe.serve.key_ring import KeyRing
from odmoe.serve.loading import LoadingServer, LoadProgress
from odmoe.serve.start import announce_serving, bind_socket
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.terminal import Output, Terminal
from scheduler.errors import HostError, LaunchError

AGAIN_S = 2.0
LASTING_S = 60.0
"""A service that was there for so long may be lost as often again."""


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
        self._reading = threading.Lock()
        """Held while keys are read and sent: else the host might get the former ones last."""
        self.served, self.lasted_s = False, 0.0
        self._since: float | None = None

    def run(self, cluster: ClusterFile) -> int:
        """Until it ends. Returns its exit code. Raises HostError if the main host or the service there was lost, and
        OSError if its log cannot be written here."""
        self._since = None
        with started_there(cluster) as there:
            try:
                self._send_keys_to(there.remote)
                with _signals(there.remote) as signals:
                    code, stderr = there.follow(partial(self._on_serving, cluster))
            finally:
                self._remote = None
                self._relay.on_lost()
                self.lasted_s = 0.0 if self._since is None else time.monotonic() - self._since
            if signals:
                return 128 + signals[-1] if code == 128 + signal.SIGINT else code
            if (lost := there.lost_error(code, stderr)) is not None:
                raise lost
            return code

    def _send_keys_to(self, remote: Remote) -> None:
        """Whatever keys are read again from now on go there too."""
        with self._reading:
            remote.send(request_of(self._settings, self._own, self._ring.keys, self._output))
            self._remote = remote

    def read_keys_again(self) -> None:
        """In a thread, when SIGHUP came."""
        with self._reading:
            read_keys_again(self._own, self._ring, lambda text: self._terminal.print_always(f"{utc_time()} {text}"))
            if (remote := self._remote) is not None:
                remote.send(KEYS + json.dumps([asdict(key) for key in self._ring.keys]) + "\n")

    def _on_serving(self, cluster: ClusterFile, name: str, service: Path) -> None:
        self._loading.close()
        self._relay.lead_to(service)
        _check(self._relay.address, cluster)
        self.served, self._since = True, time.monotonic()
        announce_serving(self._terminal, name, self._relay.address)


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


def _check(here: tuple[str, int], cluster: ClusterFile) -> None:
    """Raises HostError if the main host takes no connections from here: its sshd may forbid it."""
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
