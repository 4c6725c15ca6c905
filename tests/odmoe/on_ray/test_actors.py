"""The main node's actor, without Ray: starts that fail, starts twice, what is made after the end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odmoe.machines.cluster_file import Host
from odmoe.on_ray import actors
from odmoe.on_ray.actors import Main
from odmoe.on_ray.cluster import _differs
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError, LaunchError, LinkError

SETTINGS = Settings(model="m", cluster="local", shadow="none", threads=1, secret="s")
RESOLVED = SETTINGS.replace(precision="int4")
"""With the precision in effect."""


class Closable:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class World:
    """What a main node's actor makes of itself: every engine and fleet, and how the next model load ends."""

    def __init__(self) -> None:
        self.engines: list[Closable] = []
        self.fleets: list[Any] = []
        self.failure: Exception | None = None

    def engine(self, *given: Any) -> Closable:
        self.engines.append(Closable())
        return self.engines[-1]

    def fleet(self, *given: Any) -> Any:
        made: Any = Closable()
        made.find_seats, made.watch = lambda: [], lambda: None
        made.facts = lambda: [{"kind": "worker"}]
        made.settings = given[1]
        self.fleets.append(made)
        return made

    def main(self, settings: Settings, store: Any, engine: Any, start: Any) -> Any:
        self.settings = settings
        if self.failure is not None:
            raise self.failure
        made: Any = Closable()
        made.generate = lambda **request: Reply()
        return made


class Reply(Closable):
    def __iter__(self) -> Any:
        return iter((1, 2))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(actors.ray, "get_runtime_context", lambda: context)
    manifest = SimpleNamespace(model_digest="f", dtype="float32")
    monkeypatch.setattr(actors, "open_verified", lambda store: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr("odmoe.on_ray.fleet.Fleet", made.fleet)
    monkeypatch.setattr("odmoe.clusters.configuration.configure", lambda *_: SimpleNamespace(settings=RESOLVED))
    monkeypatch.setattr("odmoe.clusters.nodes.make_engine", made.engine)
    monkeypatch.setattr("odmoe.clusters.nodes.make_main", made.main)
    return made


@pytest.fixture
def main(world: World) -> Iterator[Main]:
    made = Main(SETTINGS, "store")
    yield made
    made.stop()


def test_before_its_start_it_has_no_figures_and_says_what_it_will_serve(main: Main) -> None:
    """Ray may have restarted its process a moment ago, when a caller asks."""
    with pytest.raises(LinkError, match="not started yet"):
        main.figures()
    assert main.serving()[2:] == ("f", "float32")


def test_a_start_that_fails_half_way_leaves_nothing_and_the_next_begins_anew(world: World, main: Main) -> None:
    """Two fleets would take the same workers from each other for ever."""
    world.failure = ConfigError("ctx-size")
    with pytest.raises(ConfigError, match="ctx-size"):
        main.start()
    assert [one.closed for one in (*world.engines, *world.fleets)] == [1, 1]
    assert main.nodes() == []
    world.failure = None
    main.start()
    main.start()
    assert [one.closed for one in world.fleets] == [1, 0]
    assert main.nodes() == [{"kind": "worker"}]


def test_whoever_asks_a_main_node_that_was_made_anew_starts_it(world: World, main: Main) -> None:
    assert list(main.generate("key", {})) == [1, 2]
    assert len(world.fleets) == 1


def test_a_main_node_that_was_stopped_does_not_start(world: World, main: Main) -> None:
    main.stop()
    with pytest.raises(LaunchError, match="stopped; start the cluster again"):
        main.start()
    assert world.fleets == []


def test_a_stop_in_the_middle_of_a_start_ends_it(world: World, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped_meanwhile(*given: Any) -> Any:
        main.stop()
        return World.fleet(world, *given)

    monkeypatch.setattr("odmoe.on_ray.fleet.Fleet", stopped_meanwhile)
    with pytest.raises(LaunchError, match="stopped while it started"):
        main.start()
    assert [one.closed for one in (*world.engines, *world.fleets)] == [1, 1]


def test_off_loopback_without_secret_and_certificate_no_node_is_begun(world: World) -> None:
    made = Main(SETTINGS.replace(host="192.0.2.1"), "store")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not a loopback address: a certificate is needed"):
        made.start()
    assert world.fleets == []
    made.stop()


def test_workers_have_the_precision_that_the_main_node_decided_on(world: World, main: Main) -> None:
    main.start()
    assert world.fleets[-1].settings == RESOLVED


@pytest.mark.parametrize("device", ["cuda", None])
def test_up_again_finds_nothing_to_change_where_a_host_has_a_device(
    device: str | None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main host's device is the main node's alone: the cluster serves with the settings that `up` gave."""
    own = {"main_device": device} if device else {}
    hosts = {"10.0.0.1": Host("main_node", 0, "10.0.0.1", settings=own), "10.0.0.2": Host("worker_node", 0, "10.0.0.2")}
    monkeypatch.setattr(actors, "hosts_of_launcher", lambda: hosts)
    monkeypatch.setattr(actors, "own_host", lambda settings: "127.0.0.1")
    monkeypatch.setattr("odmoe.clusters.devices.find_device", lambda name, setting: torch.device(name, 0))
    given = SETTINGS.replace(cluster="auto")
    made = Main(given, "store")
    made.start()
    assert world.settings.device_of("main") == (device or "auto")
    store: Any = SimpleNamespace(manifest=SimpleNamespace(model_digest="f", dtype="float32"))
    assert _differs(made.serving(), given, store, whole=True) is None
    made.stop()


@pytest.mark.parametrize(("cluster", "replicas"), [("auto", 2), ("auto", None), ("local", 2)])
def test_replicas_of_the_cluster_file_are_kept(
    cluster: str, replicas: int | None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine there are no parts, and the head's file is another cluster's."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Closable, "keep_replicas", lambda self, *given: asked.append(given), raising=False)
    monkeypatch.setattr(actors, "replicas_of_launcher", lambda: replicas)
    monkeypatch.setattr(actors, "own_host", lambda settings: "127.0.0.1")
    made = Main(SETTINGS.replace(cluster=cluster, launch_timeout=90.0), "store")
    made.start()
    assert [given[1:] for given in asked] == ([(2, 90.0)] if (cluster, replicas) == ("auto", 2) else [])
    made.stop()
