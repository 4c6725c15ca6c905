"""The processes of a cluster, as Ray actors with a plain node each. Ray starts, places and watches them; embeddings go
over gRPC, by which workers and shadow are served.

Ray imports this in a process before it makes an actor there, and callers import it to make one: neither needs the model
yet, so what computes is imported when a node starts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from odmoe.clusters.credentials import credentials
from odmoe.clusters.process import prefer_as_victim
from odmoe.on_ray.answers import Answers
from odmoe.on_ray.node_actor import NodeProcess, own_host
from odmoe.on_ray.seats import group_size, hosts_of_launcher, replicas_of_launcher
from odmoe.settings.declarations import ROLES
from odmoe.settings.settings import Settings
from odmoe.stores import open_verified
from scheduler.errors import LaunchError, LinkError
from wire.rpc.stream import check_access

if TYPE_CHECKING:
    from checkpoint.manifest import Manifest
    from checkpoint.store import ExpertStore
    from main_node.activity import Activity
    from main_node.answer import Step
    from main_node.engine.engine import Engine
    from main_node.figures import Figures
    from main_node.node import MainNode
    from odmoe.machines.cluster_file import Host
    from odmoe.on_ray.fleet import Fleet
    from scheduler.eventlog.recording import Recorder
    from scheduler.trace import Span

_log = logging.getLogger(__name__)


class Serving(NamedTuple):
    """The running nodes' settings, store (its path on every host), model and dtype."""

    settings: Settings
    store: str
    fingerprint: str
    """The `Manifest.model_digest` of what the nodes have read."""
    dtype: str


class Main(NodeProcess):
    """The main node. The steps of its generator stream to the caller.

    When Ray has restarted its process, it starts by itself and takes over the existing nodes.
    """

    def __init__(self, settings: Settings, store: str) -> None:
        super().__init__(settings, store)
        prefer_as_victim("main")
        self._main: MainNode | None = None
        self._manifest: Manifest | None = None
        self._fleet: Fleet | None = None
        self._recorder: Recorder | None = None
        self._answers = Answers()
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._answers.watch(self._stopped)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            threading.Thread(target=self._start_by_itself, name="main-start", daemon=True).start()

    def start(self) -> None:
        """Connect to every worker; the shadow joins when it is ready. Does nothing if already started. A failed start
        leaves nothing behind. Raises ODMoEError."""
        with self._starting:
            if self._stopped.is_set():
                raise LaunchError("the main node was stopped; start the cluster again")
            if self._main is None:
                self._start()

    def _start_by_itself(self) -> None:
        try:
            self.start()
        except Exception:  # noqa: BLE001 - a dead thread would block every later start
            _log.exception("the main node was restarted but does not start; the next request starts it")

    def _start(self) -> None:
        from odmoe.clusters.configuration import configure
        from odmoe.clusters.device_choice import choose_devices
        from odmoe.clusters.devices import device_of
        from odmoe.clusters.event_log import make_recorder
        from odmoe.clusters.nodes import emulation_of, make_engine
        from odmoe.on_ray.fleet import Fleet

        check_access(own_host(self._settings), *credentials(self._settings))  # needed by every node
        hosts = list(hosts_of_launcher().values()) if self._settings.uses_existing_ray else []
        device_of(_of_main_host(self._settings, hosts), "main")  # before anything is loaded
        store, emulation = open_verified(self._store), emulation_of(self._settings)
        self._manifest = store.manifest
        size = group_size(hosts) if self._settings.uses_existing_ray else None
        if size and "group_size" not in self._settings.model_fields_set:
            self._settings = self._settings.replace(group_size=size)
        parts = sum(host.role == "shadow_node" for host in hosts)
        if parts > 1 and self._settings.has_shadow and not self._settings.is_given("shadow_hosts"):
            self._settings = self._settings.replace(shadow_hosts=parts)
        configuration = configure(self._settings, store)
        self._recorder = make_recorder(self._settings, store, configuration)
        engine = make_engine(self._settings, store, configuration, emulation, self._recorder)
        replicas = replicas_of_launcher() if self._settings.uses_existing_ray else None
        if replicas is not None:
            engine.keep_replicas(store, replicas, self._settings.launch_s)
        # The devices that were chosen here are no part of what the cluster serves with.
        own = _of_main_host(self._settings, hosts)
        alone = own.uses_existing_ray
        own = choose_devices(own, store, ["main"] if alone else ROLES, beside_workers=not alone)
        of_fleet = configuration.settings
        if own.shadow_device != of_fleet.shadow_device:
            of_fleet = of_fleet.replace(shadow_device=own.shadow_device)
        fleet = self._fleet = Fleet(engine, of_fleet, self._store, emulation)
        try:
            self._main = self._begin(own, store, engine, fleet)
        except BaseException:
            self._fleet = None
            fleet.close()
            engine.close()
            raise

    def _begin(self, settings: Settings, store: ExpertStore, engine: Engine, fleet: Fleet) -> MainNode:
        """`settings`: with the main node's device."""
        from main_node.shadow_start import ShadowStart
        from odmoe.clusters.nodes import make_main

        if self._stopped.is_set():  # stop() came before it could end this fleet
            raise LaunchError("the main node was stopped while it started; start the cluster again")
        seats = fleet.find_seats()
        start = None
        if ("shadow", 0) in seats:  # its process starts now; it is read when this one has loaded its model
            begun = fleet.begin("shadow", 0)
            if not self._settings.uses_existing_ray:
                start = ShadowStart(partial(fleet.join_first, "shadow", 0, begun))
        workers = [(number, fleet.begin(kind, number)) for kind, number in seats if kind == "worker"]
        main = make_main(settings, store, engine, start)
        if start is not None:
            start.begin()
        if self._settings.uses_existing_ray:  # a missing node is no failure here: the reconnector keeps trying
            for kind, number in seats:
                fleet.reconnector.on_lost(kind, number)
            fleet.watch()
        else:
            for number, pending in workers:
                fleet.join_first("worker", number, pending)
        return main

    def generate(self, key: str, request: dict[str, Any]) -> Iterator[Step]:
        """`request` has the arguments of `MainNode.generate`."""
        if self._main is None:  # restarted since the caller found it
            self.start()
        main: Any = self._main
        answer = main.generate(**request)
        with self._answers.under_way(key, answer):
            for step in answer:  # noqa: UP028 - Ray calls `send`, which an answer does not have
                yield step

    def hold(self, keys: list[str]) -> None:
        """The callers of these answers still read them."""
        self._answers.hold(keys)

    def cancel(self, key: str) -> None:
        """Cancel the answer to `key`, whether it has begun or not."""
        self._answers.cancel(key)

    def changes(self, since: int | None) -> tuple[int, list[str]]:
        """As `Cluster.changes`."""
        return self._main.engine.peers.membership.since(since) if self._main is not None else (0, [])

    def figures(self) -> Figures:
        """As `Cluster.figures`."""
        if self._main is None:
            raise LinkError("the main node has not started yet, so that it has no figures; ask again in a moment")
        from main_node.collect_figures import figures_of

        return figures_of(self._main)

    def activity(self, since: int | None) -> Activity:
        """As `Cluster.activity`."""
        if self._main is None:
            raise LinkError("the main node has not started yet, so that it does nothing; ask again in a moment")
        from main_node.collect_figures import activity_of

        return activity_of(self._main, since)

    def trace(self) -> list[Span]:
        return self._main.engine.trace() if self._main is not None else []

    def recording(self) -> bytes:
        from odmoe.clusters.event_log import recording_of

        return recording_of(self._recorder)

    def serving(self) -> Serving:
        manifest = self._manifest or open_verified(self._store).manifest
        return Serving(self._settings, self._store, manifest.model_digest, manifest.dtype)

    def nodes(self) -> list[dict[str, Any]]:
        """Facts of every worker and the shadow; empty before `start` has finished."""
        return self._fleet.facts() if self._fleet is not None and self._main is not None else []

    def stop(self) -> None:
        self._stopped.set()
        fleet, main = self._fleet, self._main
        if fleet is not None:
            fleet.close()
        if main is not None:
            main.close()


def _of_main_host(settings: Settings, hosts: Sequence[Host]) -> Settings:
    """The settings with those of the cluster file for the main node's host alone."""
    from odmoe.clusters.devices import with_workers_of
    from odmoe.machines.cluster_file import worker_settings

    settings = with_workers_of(settings, worker_settings(hosts))
    device = next((host.settings.get("main_device") for host in hosts if host.role == "main_node"), None)
    return settings if device is None else settings.replace(main_device=device)
