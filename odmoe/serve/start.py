"""`odmoe serve`: a model on a cluster, by the OpenAI API."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odmoe.api.checks import check_early
from odmoe.api.model import start_model
from odmoe.clusters.node_watch import NodeWatch
from odmoe.clusters.process import prepare_process
from odmoe.log_thread import LogThread, Write, utc_time
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.settings.units import parse_bytes
from odmoe.terminal import Output, Terminal
from scheduler.errors import ClusterError, ConfigError, LinkError, ODMoEError

if TYPE_CHECKING:
    from odmoe.api.model import Model
    from odmoe.serve.connection import ClientLimits
    from odmoe.serve.key_ring import KeyRing
    from odmoe.serve.lifetime import HttpServer
    from odmoe.serve.loading import LoadingServer, LoadProgress
    from odmoe.serve.service import Service


GONE_S = 5.0
"""How long a main node does not exist before the service ends."""
Announce = Callable[[str, tuple[str, int]], None]
"""Told the model's name and the address once the service listens."""


def run_serve(
    settings: Settings,
    own: ServeSettings,
    keys: KeyRing,
    output: Output,
    announce: Announce | None = None,
) -> int:
    """Serve until a signal comes. Returns the exit code. `keys`: read again on SIGHUP. `announce`: None says it on
    standard error.

    Raises ConfigError, CheckpointError, StoreError, ClusterError.
    """
    prepare_process(output.debug, timed=True)
    check_early(settings)
    with closing(bind_socket(own)) as listening, LogThread() as log:
        from odmoe.serve.hangup import on_hangup, read_keys_again
        from odmoe.serve.loading import LoadingServer, LoadProgress, StartTerminal

        progress = LoadProgress()
        terminal = StartTerminal(output, progress)
        starting = _Starting(own, keys, listening, log, terminal, announce or _saying(terminal), output.quiet)
        reread = partial(read_keys_again, own, keys, _timed_writer(log, terminal.print_always))
        with on_hangup(reread), LoadingServer(listening, progress, starting.write, starting.line) as loading:
            if announce is None and not terminal.console.is_terminal:  # no spinner says that it starts
                terminal.notify(f"starting {settings.model or settings.cluster}")
            with start_model(settings, terminal) as model:
                return _serve(model, starting, progress, loading)


@dataclass(frozen=True, slots=True)
class _Starting:
    """What is there before the model is."""

    own: ServeSettings
    keys: KeyRing
    listening: socket.socket
    log: LogThread
    terminal: Terminal
    announce: Announce
    quiet: bool

    @property
    def write(self) -> Callable[[str], None]:
        """Of the access log."""
        return (lambda line: None) if self.quiet else self.log.line

    @property
    def line(self) -> Callable[[dict[str, Any]], str]:
        from odmoe.serve.access_log import FORMATS

        return FORMATS[self.own.log_format]


def _saying(terminal: Terminal) -> Announce:
    return lambda name, address: announce_serving(terminal, name, address)


def announce_serving(terminal: Terminal, name: str, address: tuple[str, int]) -> None:
    """The URL for clients, and that of the page for a browser."""
    host, port = address
    root = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    terminal.print_always(f"serving {name} at {root}/v1")
    terminal.print_always(f"page for a browser: {root}/")


def bind_socket(own: ServeSettings) -> socket.socket:
    """Bound before the model is loaded, so that an address in use is told at once."""
    host, port = own.address
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--bind is {own.bind}: {error.strerror or error}; allowed: a free port of an address of this machine"
        ) from error
    return listening


def _serve(model: Model, starting: _Starting, progress: LoadProgress, loading: LoadingServer) -> int:
    from odmoe.serve.app import Access, make_app
    from odmoe.serve.lifetime import HttpServer
    from odmoe.serve.warm_up import warm_up

    own, log, terminal = starting.own, starting.log, starting.terminal
    service = make_service(model, own)
    try:
        service.notify = notify = _timed_writer(log, terminal.notify)
        service.log_cause = _timed_writer(log, terminal.print_always)
        app = make_app(
            service, Access(starting.keys, own.cors_origin, starting.write, own.log_format, own.forwarded_allow_ips)
        )
        progress.set("answering a first prompt")
        warm_up(service)
        end = _LostMainNode(model.opened.settings.uses_existing_ray)
        with NodeWatch(model.cluster, notify, end.on_poll):
            client_limits = own_client_limits(own, service.answer_pool.places)
            loading.close()
            server = HttpServer(app, service, starting.listening, own.drain_timeout, notify, client_limits)
            end.server = server
            starting.announce(service.name, starting.listening.getsockname()[:2])
            return server.run()
    finally:
        service.close()


def _timed_writer(log: LogThread, write: Write) -> Callable[[str], None]:
    """Lines of the log with their time."""
    return lambda text: log.line(f"{utc_time()} {text}", write)


class _LostMainNode:
    """Ends a service whose main node was started for it and is gone: nobody starts it again, but whoever started the
    service may start that again."""

    def __init__(self, lasting: bool) -> None:
        """`lasting`: the cluster was there before, and its main node may come back."""
        self._lasting = lasting
        self._since: float | None = None
        self.server: HttpServer | None = None

    def on_poll(self, error: ODMoEError | None) -> None:
        """At the cluster, each second. `error`: why it did not answer."""
        now = time.monotonic()
        if not isinstance(error, LinkError) or self._lasting:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= GONE_S and self.server is not None:
            self._since = None
            self.server.fail(ClusterError(f"the cluster has ended: {error}; start odmoe serve again"))


def own_client_limits(own: ServeSettings, answers: int) -> ClientLimits:
    """As the settings have it. `answers`: that may be under way or wait."""
    from odmoe.serve.lifetime import usual_client_limits

    usual = usual_client_limits(answers)
    most = own.connections or usual.connections
    return replace(
        usual,
        connections=most,
        address_connections=min(most, own.address_connections or usual.address_connections),
    )


def make_service(model: Model, own: ServeSettings) -> Service:
    """What the routes share."""
    from odmoe.serve.metrics import Metrics
    from odmoe.serve.request_fields import UnknownFields
    from odmoe.serve.service import Limits, Service

    served = model.cluster.serves()
    usual = Path(served.model.rstrip("/") or model.cluster.store()).name
    name, *aliases = own.model_name or (usual,)
    limits = Limits(
        own.max_tokens,
        own.request_timeout,
        body_bytes=parse_bytes(own.body_size),
        request_bytes=parse_bytes(own.request_memory),
    )
    tls = model.opened.settings.tls
    metrics = Metrics(model.cluster, Path(tls).expanduser() if tls else None)
    service = Service(model, name, served, limits, metrics)
    service.aliases = tuple(aliases)
    service.unknown_fields = UnknownFields(own.strict, lambda line: service.notify(line))
    return service
