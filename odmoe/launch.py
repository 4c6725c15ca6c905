"""Nodes as Ray actors, on this machine (`local`) or on a running Ray cluster. The only file that imports ray.

Each actor holds a plain node and serves it over gRPC; Ray starts, places and watches the actors and carries no
embeddings. A node stands where its custom resource is: `main_node`, `shadow_node` or `worker_node`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from checkpoint.store import ExpertStore
from main_node.engine import Engine, Kind
from main_node.node import Answer, MainNode, Step
from main_node.rejoin import Keeper
from main_node.sampling import How
from odmoe.cluster import travelled
from odmoe.process import prepare_libraries, prepare_process, undisturbed
from odmoe.ray_host import check_reachable, kill_half_started, warn_of_strangers
from odmoe.settings import MAX_PARALLEL, Settings
from odmoe.stores import open_verified
from scheduler.emulation import Emulation
from scheduler.errors import ClusterError, LaunchError, LinkError, ODMoEError
from scheduler.trace import Span
from wire.base import Node
from wire.grpc_client import connect

FREE_S = 15.0
STOP_S = 5.0
CONTROL: dict[str, Any] = {"concurrency_groups": {"control": 4}}  # threads that no answer takes
WORKER_S = 60.0  # how long a request waits for a worker where every one is lost
TRIES = 3  # how often a node whose process dies while the cluster starts is asked again
STEP_S = 600.0
"""Most time between two tokens. Every wait inside the main node is shorter; this is for one that is gone."""


class _Actor:
    """What every process of ours does first."""

    def __init__(self, settings: Settings, store: str) -> None:
        prepare_process()
        prepare_libraries(settings.threads_a_node)
        self._settings = settings
        self._store = store


class _Served(_Actor):
    """A node of one role, served over gRPC once `start` has been called. Ray makes a new one where it has died."""

    def __init__(self, settings: Settings, store: str) -> None:
        super().__init__(settings, store)
        self._server: Any = None
        self._node: Node | None = None
        self._starting = threading.Lock()
        self._stopped = False

    def start(self, role: Kind, number: int) -> str:
        """Build the node and serve it; the address. A node that runs already says its address again."""
        with self._starting:
            if self._stopped:
                raise LaunchError(f"the {role} was stopped; start the cluster again")
            if self._server is None:
                self._build(role, number)
            return str(self._server.address)

    def _build(self, role: Kind, number: int) -> None:
        from checkpoint.single import ExpertArithmetic
        from odmoe.cluster import emulation_of, make_shadow, make_worker
        from wire.grpc_server import GrpcServer

        store, emulation = open_verified(self._store), emulation_of(self._settings)
        if role == "shadow":
            self._node = make_shadow(self._settings, store, emulation)
        else:
            manifest = store.manifest
            arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
            self._node = make_worker(number, self._settings, store, arithmetic, emulation)
        self._server = GrpcServer(self._node, role, own_host(self._settings), secret=self._settings.secret)

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.close()
        if self._node is not None:
            self._node.close()


class _Fleet:
    """The actors of workers and shadow: how each comes to the engine, at first and whenever it was lost."""

    def __init__(
        self, engine: Engine, workers: list[Any], shadow: Any, settings: Settings, emulation: Emulation | None
    ) -> None:
        self.keeper = Keeper(self.join)
        engine.on_lost = self.keeper.lost
        self._engine = engine
        self._workers, self._shadow = workers, shadow
        self._emulation = emulation
        self._secret, self._ready_s = settings.secret, settings.launch_s

    def begin(self, kind: Kind, number: int) -> Any:
        actor = self._shadow if kind == "shadow" else self._workers[number]
        return actor.start.remote(kind, number)

    def join(self, kind: Kind, number: int, begun: Any = None) -> None:
        """One attempt, of at most `launch_s` for the process and as long for the stream. Raises ODMoEError."""
        name = "the shadow" if kind == "shadow" else f"worker {number}"
        begun = begun or self.begin(kind, number)
        end = time.monotonic() + self._ready_s
        while not ray.wait([begun], timeout=0.5)[0] and time.monotonic() < end:
            if self.keeper.closing.is_set():
                raise LinkError(f"the main node was closed before {name} was ready")
        address = get(begun, max(0.0, end - time.monotonic()), name)
        to = travelled(partial(connect, address, kind, secret=self._secret), self._emulation)
        if kind == "shadow":
            self._engine.add_shadow(to, self._ready_s)
        else:
            self._engine.add_worker(number, to, self._ready_s)

    def join_first(self, kind: Kind, number: int, begun: Any = None) -> None:
        """As `join`, but a process that dies on the way is asked again."""
        for left in reversed(range(TRIES)):
            try:
                return self.join(kind, number, begun)
            except LinkError:
                if not left or self.keeper.closing.wait(1.0):
                    raise
                begun = None


class _Main(_Actor):
    """The main node. Its generator's steps stream back to whoever asked."""

    def __init__(self, settings: Settings, store: str) -> None:
        super().__init__(settings, store)
        self._main: MainNode | None = None
        self._fleet: _Fleet | None = None
        self._answers: dict[str, Answer] = {}
        self._cancelled: set[str] = set()
        self._changing = threading.Lock()

    def start(self, workers: list[Any], shadow: Any) -> None:
        """Connect to every worker; the shadow joins when it is ready."""
        from main_node.node import ShadowStart
        from odmoe.cluster import emulation_of, make_engine, make_main

        store, emulation = open_verified(self._store), emulation_of(self._settings)
        engine = make_engine(self._settings, store, emulation)
        fleet = self._fleet = _Fleet(engine, workers, shadow, self._settings, emulation)
        start = None
        if shadow is not None:  # its process begins now; it is listened to when this one has no models to load any more
            start = ShadowStart(partial(fleet.join_first, "shadow", 0, fleet.begin("shadow", 0)))
        self._main = make_main(self._settings, store, engine, start)
        if start is not None:
            start.begin()
        begun = [fleet.begin("worker", number) for number in range(len(workers))]
        for number, pending in enumerate(begun):
            fleet.join_first("worker", number, pending)

    def generate(self, key: str, request: dict[str, Any]) -> Iterator[Step]:
        """`request`: the arguments of `MainNode.generate`."""
        if self._main is None:
            raise LaunchError("the main node was asked before it was started")
        self._main.engine.wait_for_worker(WORKER_S)
        answer = self._main.generate(**request)
        with self._changing:
            self._answers[key] = answer
            if key in self._cancelled:
                answer.cancel()
        try:
            for step in answer:  # noqa: UP028 - Ray asks by `send`, which an answer does not have
                yield step
        finally:
            with self._changing:
                del self._answers[key]
                self._cancelled.discard(key)
            answer.close()

    def cancel(self, key: str) -> None:
        """The answer to `key` is no longer wanted, be it under way or yet to begin."""
        with self._changing:
            answer = self._answers.get(key)
            if answer is None:
                self._cancelled.add(key)
        if answer is not None:
            answer.cancel()

    def trace(self) -> list[Span]:
        return self._main.engine.trace() if self._main is not None else []

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        if self._fleet is not None:
            self._fleet.keeper.close()
        if self._main is not None:
            self._main.close()


def own_host(settings: Settings) -> str:
    """Where this node's server listens: loopback for `local`, this host's cluster address otherwise."""
    return settings.host if settings.cluster == "local" else str(ray.util.get_node_ip_address())


def get(pending: Any, deadline_s: float, who: str) -> Any:
    """`ray.get` with a deadline. Errors of our tree come out as themselves; LinkError: the actor's process is gone."""
    try:
        return ray.get(pending, timeout=deadline_s)
    except GetTimeoutError as error:
        raise LaunchError(f"{who} was not ready within {deadline_s:g} s; ray status shows what is missing") from error
    except RayTaskError as error:
        if isinstance(error.cause, ODMoEError):
            raise error.cause from error
        raise ClusterError(f"{who} failed: {error.cause!r}") from error
    except RayActorError as error:
        raise LinkError(f"{who} died: {str(error).splitlines()[0]}") from error
    except RayError as error:
        raise ClusterError(f"{who} cannot be reached: {str(error).splitlines()[0]}") from error


class RayAnswer(Iterator[Step]):
    """One answer, streamed from the main node's process. It is asked for with the first token."""

    def __init__(self, main: Any, key: str, request: dict[str, Any]) -> None:
        self._main = main
        self._key = key
        self._steps = self._run(request)

    def __next__(self) -> Step:
        """Raises RequestCancelledError after `cancel`, RequestFailedError, ClusterError."""
        return next(self._steps)

    def cancel(self) -> None:
        """From any thread, at any time."""
        with contextlib.suppress(RayError):
            self._main.cancel.options(concurrency_group="control").remote(self._key)

    def close(self) -> None:
        """From the thread that iterates."""
        self._steps.close()

    def _run(self, request: dict[str, Any]) -> Generator[Step, None, None]:
        pending = self._main.generate.options(num_returns="streaming").remote(self._key, request)
        done = False
        try:
            while not done:
                ready, _ = ray.wait([pending], timeout=STEP_S)
                if not ready:
                    raise ClusterError(f"the main node has sent nothing for {STEP_S:g} s")
                following = next(pending, None)
                if following is None:
                    raise ClusterError("the main node ended the answer early; see its log")
                step: Step = get(following, STEP_S, "the main node, without which the cluster must be started again,")
                done = step.report is not None
                yield step
        finally:
            if not done:
                self.cancel()


class RayCluster:
    """One actor a node. `local` starts Ray on this machine and stops it again; otherwise Ray must be running."""

    def __init__(self, settings: Settings, store: ExpertStore, say: Any = lambda text: None) -> None:
        self._actors: dict[str, Any] = {}
        self._keys = (str(n) for n in range(1 << 62))
        self._ours = settings.cluster == "local"
        settings = settings.but(secret=settings.secret or secrets.token_hex(16))
        say("starting Ray" if self._ours else "connecting to Ray")
        try:
            self._connect(settings)
            say(f"starting {settings.workers} worker(s), the shadow and the main node: some seconds each")
            self._start(settings, str(store.path.resolve()))
        except BaseException:
            self.close()
            raise

    def _connect(self, settings: Settings) -> None:
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # those of an answer that nobody waits for any more
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        common: dict[str, Any] = {"namespace": "odmoe", "log_to_driver": False, "logging_level": "ERROR"}
        if not self._ours:
            check_reachable(settings.cluster)
            try:
                ray.init(address=settings.cluster, **common)
            except (ConnectionError, RayError, ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                raise LaunchError(
                    f"no Ray cluster at {settings.cluster!r}: {reason}; start one, or use local"
                ) from error
            warn_of_strangers(ray.get_runtime_context().gcs_address)
            self._check_room(settings)
            return
        if os.environ.get("RAY_AUTH_MODE") != "token":
            raise LaunchError("Ray was imported before prepare_ray('local'); start clusters by odmoe.start")
        roles = {"main_node": 1, "shadow_node": 1, "worker_node": settings.workers}
        try:
            ray.init(
                address="local", num_cpus=settings.workers + 2, num_gpus=0, resources=roles, include_dashboard=False,
                object_store_memory=80 << 20, **common,
            )  # fmt: skip
        except (OSError, RayError, ValueError, RuntimeError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise LaunchError(f"Ray does not start on this machine: {reason}; use --cluster embedded") from error

    def _check_room(self, settings: Settings) -> None:
        """Enough hosts of each role at all, and free within FREE_S: those of a run that has just ended take a while."""
        found = ray.cluster_resources()
        wanted = {"main_node": 1, "shadow_node": int(settings.shadow != "none"), "worker_node": settings.workers}
        for role, count in wanted.items():
            if found.get(role, 0) < count:
                raise LaunchError(
                    f"the Ray cluster offers {found.get(role, 0):g} {role}, {count} are wanted; start Ray on more "
                    f"hosts with --resources='{{\"{role}\": 1}}', or give fewer --workers"
                )
        end = time.monotonic() + FREE_S
        while taken := [role for role, count in wanted.items() if ray.available_resources().get(role, 0) < count]:
            if time.monotonic() > end:
                raise LaunchError(f"every {taken[0]} of the Ray cluster is busy with another run; try again later")
            time.sleep(0.5)

    def _start(self, settings: Settings, store: str) -> None:
        run = secrets.token_hex(4)

        def begin(kind: type, name: str, resource: str, **options: Any) -> Any:
            """A process of its own, where a resource of that name is free."""
            actor = (ray.remote(**CONTROL)(kind) if kind is _Main else ray.remote(kind)).options(
                name=f"{name} of {run}", num_cpus=0, resources={resource: 1}, max_task_retries=0, **options
            )
            self._actors[name] = actor.remote(settings, store)
            return self._actors[name]

        again = {"max_concurrency": 4, "max_restarts": -1}
        workers = [begin(_Served, f"worker {n}", "worker_node", **again) for n in range(settings.workers)]
        shadow = begin(_Served, "shadow", "shadow_node", **again) if settings.shadow != "none" else None
        self._main = begin(_Main, "main node", "main_node", max_concurrency=MAX_PARALLEL, max_restarts=0)
        get(self._main.start.remote(workers, shadow), 2 * settings.launch_s, "the main node")

    def pid(self, name: str) -> int:
        """Process id of `worker N`, `shadow` or `main node`, for fault tests. Raises LinkError while it is gone."""
        return int(get(self._actors[name].pid.remote(), STOP_S, name))

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Unpack[How]) -> RayAnswer:
        request = {"prompt": prompt, "max_new_tokens": max_new_tokens, **how}
        return RayAnswer(self._main, next(self._keys), request)

    def trace(self) -> list[Span]:
        spans: list[Span] = get(
            self._main.trace.options(concurrency_group="control").remote(), WORKER_S, "the main node"
        )
        return spans

    def close(self) -> None:
        """Stop our actors, and Ray where we started it. Bounded: a node that does not answer is killed.

        A second Ctrl-C does not cut it short: that would leave Ray's processes behind.
        """
        with undisturbed():
            self._close()

    def _close(self) -> None:
        if not ray.is_initialized():
            if self._ours:
                kill_half_started(str(Path(ray.__file__).parent))
            return
        main = self._actors.pop("main node", None)
        for actors in ([main] if main else [], self._actors.values()):  # first the one that asks for the others again
            with contextlib.suppress(RayError):
                quick = {"concurrency_group": "control"}
                stops = [actor.stop.options(**(quick if actor is main else {})).remote() for actor in actors]
                if stops:
                    ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
                for actor in actors:
                    ray.kill(actor, no_restart=True)
        self._actors = {}
        stopper = threading.Thread(target=ray.shutdown, daemon=True)
        stopper.start()
        stopper.join(20.0)
