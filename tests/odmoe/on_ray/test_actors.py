"""The main node's actor and its fleet, without Ray: starts that fail, starts twice, what is made after the end."""

from __future__ import annotations

import importlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import odmoe.clusters.base
from odmoe.clusters.process import prepare_ray
from odmoe.on_ray.seats import Seat
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError, LaunchError, LinkError, StoreNotFoundError

pytestmark = pytest.mark.timeout(60)

SETTINGS = Settings(model="m", cluster="local", shadow="none", threads=1, secret="s")


def module(name: str) -> Any:
    """Importing these imports ray, which then reads how it is to authenticate."""
    prepare_ray("local")
    return importlib.import_module(f"odmoe.on_ray.{name}")


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
        made.look = lambda: []
        made.facts = lambda: [{"kind": "worker"}]
        self.fleets.append(made)
        return made

    def main(self, store: Any, engine: Any, start: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        made: Any = Closable()
        made.engine = SimpleNamespace(wait_for_worker=lambda seconds: True)
        made.generate = lambda **request: Reply()
        return made


class Reply(Closable):
    def __iter__(self) -> Any:
        return iter((1, 2))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    actors = module("actors")
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(actors.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actors, "open_verified", lambda store: None)
    monkeypatch.setattr(module("fleet"), "Fleet", made.fleet)
    monkeypatch.setattr(odmoe.clusters.base, "make_engine", made.engine)
    monkeypatch.setattr(odmoe.clusters.base, "make_main", lambda settings, *rest: made.main(*rest))
    return made


@pytest.fixture
def main(world: World) -> Any:
    made = module("actors").Main(SETTINGS, "store")
    yield made
    made.stop()


def test_a_start_that_fails_half_way_leaves_nothing_and_the_next_begins_anew(world: World, main: Any) -> None:
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


def test_whoever_asks_a_main_node_that_was_made_anew_starts_it(world: World, main: Any) -> None:
    assert list(main.generate("key", {})) == [1, 2]
    assert len(world.fleets) == 1


def test_a_main_node_that_was_stopped_does_not_start(world: World, main: Any) -> None:
    main.stop()
    with pytest.raises(LaunchError, match="stopped; start the cluster again"):
        main.start()
    assert world.fleets == []


def test_a_stop_in_the_middle_of_a_start_ends_it(world: World, main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped_meanwhile(*given: Any) -> Any:
        main.stop()
        return World.fleet(world, *given)

    monkeypatch.setattr(module("fleet"), "Fleet", stopped_meanwhile)
    with pytest.raises(LaunchError, match="stopped while it started"):
        main.start()
    assert [one.closed for one in (*world.engines, *world.fleets)] == [1, 1]


def test_off_loopback_without_secret_and_certificate_no_node_is_begun(world: World) -> None:
    made = module("actors").Main(SETTINGS.but(host="192.0.2.1"), "store")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not a loopback address: a certificate is needed"):
        made.start()
    assert world.fleets == []
    made.stop()


@pytest.mark.parametrize("replace", [False, True])
def test_nodes_whose_store_was_removed_are_replaced_where_that_is_asked_for(
    replace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*given: Any) -> Any:
        raise StoreNotFoundError("no store at /gone")

    ended: list[bool] = []
    launch = module("cluster")
    asked = SimpleNamespace(options=lambda **quick: SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(launch.ray, "get_actor", lambda *name: SimpleNamespace(serving=asked))
    monkeypatch.setattr(launch, "get", gone)
    monkeypatch.setattr(launch, "stop_nodes", lambda: ended.append(True))
    cluster = launch.RayCluster.__new__(launch.RayCluster)
    cluster._replace, cluster._say = replace, lambda text: None
    if replace:
        assert not cluster._attach(SETTINGS, None)
    else:
        with pytest.raises(StoreNotFoundError, match="no store at /gone"):
            cluster._attach(SETTINGS, None)
    assert ended == [True] * replace


# --- the fleet ------------------------------------------------------------------------------------------------


class Pretended:
    """`ray`, as far as a fleet asks for processes: those that it made, and how the next question to one ends."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.killed: list[Any] = []
        self.slow = threading.Event()
        self.slow.set()

    def nodes(self) -> list[dict[str, Any]]:
        address, resources = "127.0.0.1", {"worker_node": 2.0}
        return [{"NodeManagerAddress": address, "Alive": True, "Resources": resources}]

    def remote(self, kind: type) -> Any:
        return self

    def options(self, name: str, **options: Any) -> Any:
        def make(*given: Any) -> Any:
            self.slow.wait(10)
            self.made.append(name)
            return SimpleNamespace(name=name)

        return SimpleNamespace(remote=make)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made, fleet = Pretended(), module("fleet")
    monkeypatch.setattr(fleet, "ray", made)
    monkeypatch.setattr(fleet, "end", made.killed.extend)
    return made


def fleet_of() -> Any:
    return module("fleet").Fleet(SimpleNamespace(nodes=list), SETTINGS, "store", None)


def test_a_fleet_that_is_closed_makes_no_process(ray: Pretended) -> None:
    fleet = fleet_of()
    assert fleet.look() == [("worker", 0), ("worker", 1)]
    fleet.actor("worker", 0)
    fleet.close()
    with pytest.raises(LinkError, match=r"closed before worker_node at 127\.0\.0\.1, place 1"):
        fleet.actor("worker", 1)
    assert [actor.name for actor in ray.killed] == ray.made == ["worker_node at 127.0.0.1"]


def test_what_is_being_made_while_it_closes_is_ended_too(ray: Pretended) -> None:
    fleet = fleet_of()
    fleet.look()
    ray.slow.clear()
    making = threading.Thread(target=fleet.actor, args=("worker", 0))
    making.start()
    closing = threading.Thread(target=fleet.close)
    closing.start()
    ray.slow.set()
    making.join(10)
    closing.join(10)
    assert [actor.name for actor in ray.killed] == ray.made


def test_a_process_that_is_gone_for_good_is_made_anew(ray: Pretended) -> None:
    fleet = fleet_of()
    fleet.look()
    fleet.actor("worker", 0)
    fleet._forget(Seat("worker_node", "127.0.0.1"))
    fleet.actor("worker", 0)
    assert ray.made == ["worker_node at 127.0.0.1"] * 2
