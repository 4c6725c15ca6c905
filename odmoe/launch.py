"""Nodes as Ray actors, on this machine (`local`) or on a running Ray cluster. The only file that imports ray.

Each actor holds a plain node and serves it over gRPC; Ray starts, places and watches the actors and carries no
embeddings. A node stands where its custom resource is: `main_node`, `shadow_node` or `worker_node`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from checkpoint.store import ExpertStore
from main_node.node import MainNode, Step
from odmoe.settings import Settings
from scheduler.errors import ClusterError, LaunchError, ODMoEError
from wire.base import Node

REACH_S = 5.0
FREE_S = 15.0
STEP_S = 600.0
"""Most time between two tokens. Every wait inside the main node is shorter; this is for one that is gone."""


class _Served:
    """A node of one role, served over gRPC once `start` has been called."""

    def __init__(self, settings: Settings, store: str) -> None:
        from odmoe.process import prepare_libraries, prepare_process

        prepare_process()
        prepare_libraries(settings.threads_a_node)
        self._settings = settings
        self._store = store
        self._server: Any = None
        self._node: Node | None = None

    def start(self, role: str, number: int) -> str:
        """Build the node and serve it; the address."""
        from checkpoint.single import ExpertArithmetic
        from odmoe.cluster import make_shadow, make_worker
        from wire.grpc_server import GrpcServer

        store = open_verified(self._store)
        if role == "shadow":
            self._node = make_shadow(self._settings, store)
        else:
            manifest = store.manifest
            arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
            self._node = make_worker(number, self._settings, store, arithmetic)
        host = own_host(self._settings)
        self._server = GrpcServer(self._node, role, host, secret=self._settings.secret)  # type: ignore[arg-type]
        return str(self._server.address)

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._node is not None:
            self._node.close()


class _Main:
    """The main node. Its generator's steps stream back to whoever asked."""

    def __init__(self, settings: Settings, store: str) -> None:
        from odmoe.process import prepare_libraries, prepare_process

        prepare_process()
        prepare_libraries(settings.threads_a_node)
        self._settings = settings
        self._store = store
        self._main: MainNode | None = None
        self._cancelled: set[str] = set()

    def start(self, workers: list[Any], shadow: Any) -> None:
        """Connect to every worker; the shadow joins when it is ready."""
        from checkpoint.family import parse_dtype
        from main_node.node import ShadowStart
        from odmoe.cluster import make_engine
        from wire.grpc_client import connect

        secret, ready_s = self._settings.secret, self._settings.launch_s
        store = open_verified(self._store)
        engine = make_engine(self._settings, store)

        def join_shadow() -> None:
            address = get(shadow.start.remote("shadow", 0), ready_s, "the shadow")
            engine.add_shadow(partial(connect, address, "shadow", secret=secret), ready_s)

        start = ShadowStart(join_shadow) if shadow is not None else None
        if start is not None:
            start.begin()
        self._main = MainNode(store, engine, parse_dtype(store.manifest.dtype), start, ready_s)
        addresses = [actor.start.remote("worker", number) for number, actor in enumerate(workers)]
        for number, pending in enumerate(addresses):
            address = get(pending, ready_s, f"worker {number}")
            engine.add_worker(number, partial(connect, address, "worker", secret=secret), ready_s)

    def generate(self, key: str, prompt: list[int], max_new_tokens: int, ignore_eos: bool) -> Iterator[Step]:
        if self._main is None:
            raise LaunchError("the main node was asked before it was started")
        steps = self._main.generate(prompt, max_new_tokens, ignore_eos)
        with contextlib.closing(steps):  # type: ignore[type-var]
            for step in steps:
                yield step
                if key in self._cancelled:
                    self._cancelled.discard(key)
                    return

    def cancel(self, key: str) -> None:
        """The answer to `key` is no longer wanted."""
        self._cancelled.add(key)

    def stop(self) -> None:
        if self._main is not None:
            self._main.close()


def open_verified(path: str) -> ExpertStore:
    """This host's copy of the store, read whole once and again whenever it has changed. Raises StoreError."""
    from odmoe.stores import cache_dir

    store = ExpertStore.open(Path(path))
    store.verify_once(cache_dir() / "verified")
    return store


def own_host(settings: Settings) -> str:
    """Where this node's server listens: loopback for `local`, this host's cluster address otherwise."""
    return settings.host if settings.cluster == "local" else str(ray.util.get_node_ip_address())


def check_reachable(address: str) -> None:
    """Ray itself would try for minutes. Raises LaunchError when nothing at `address` speaks gRPC."""
    if address == "auto" or os.environ.get("RAY_USE_TLS") == "1":
        return
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(REACH_S)
        except grpc.FutureTimeoutError as error:
            raise LaunchError(
                f"no Ray cluster answers at {address} within {REACH_S:g} s; check host and port (ray status), "
                "or use --cluster local"
            ) from error


def kill_half_started() -> None:
    """What `ray.init` had begun when it was given up: Ray itself forgets the raylet's own children."""
    import psutil  # type: ignore[import-untyped]  # comes with ray

    home = str(Path(ray.__file__).parent)

    def kill(process: Any) -> None:
        with contextlib.suppress(psutil.Error):
            process.suspend()  # so that it starts no more
            for child in process.children():
                kill(child)
            process.kill()

    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(home in part for part in process.cmdline()):
                kill(process)


def get(pending: Any, deadline_s: float, who: str) -> Any:
    """`ray.get` with a deadline; errors of our tree come out as themselves, others as ClusterError or LaunchError."""
    try:
        return ray.get(pending, timeout=deadline_s)
    except GetTimeoutError as error:
        raise LaunchError(f"{who} was not ready within {deadline_s:g} s; ray status shows what is missing") from error
    except RayTaskError as error:
        if isinstance(error.cause, ODMoEError):
            raise error.cause from error
        raise ClusterError(f"{who} failed: {error.cause!r}") from error
    except RayActorError as error:
        raise ClusterError(f"{who} died: {str(error).splitlines()[0]}") from error
    except RayError as error:
        raise ClusterError(f"{who} cannot be reached: {str(error).splitlines()[0]}") from error


class RayCluster:
    """One actor a node. `local` starts Ray on this machine and stops it again; otherwise Ray must be running."""

    def __init__(self, settings: Settings, store: ExpertStore, say: Any = lambda text: None) -> None:
        self._actors: list[Any] = []
        self._keys = (str(n) for n in range(1 << 62))
        self._ours = settings.cluster == "local"
        settings = replace(settings, secret=settings.secret or secrets.token_hex(16))
        say("starting Ray" if self._ours else "connecting to Ray")
        try:
            self._connect(settings)
            say(f"starting {settings.workers} worker(s), the shadow and the main node: some seconds each")
            self._start(settings, str(store.path.resolve()))
        except BaseException:
            self.close()
            raise

    def _connect(self, settings: Settings) -> None:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
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
        node = ray.remote(_Served)
        self._workers = [self._actor(node, "worker_node", 4, settings, store) for _ in range(settings.workers)]
        shadow = self._actor(node, "shadow_node", 4, settings, store) if settings.shadow != "none" else None
        self._main = self._actor(ray.remote(_Main), "main_node", 16, settings, store)
        get(self._main.start.remote(self._workers, shadow), 2 * settings.launch_s, "the main node")

    def _actor(self, kind: Any, role: str, concurrency: int, settings: Settings, store: str) -> Any:
        options = kind.options(num_cpus=0, resources={role: 1}, max_concurrency=concurrency)
        actor = options.remote(settings, store)
        self._actors.append(actor)
        return actor

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, in order; what a fault test kills."""
        return [get(actor.pid.remote(), STEP_S, "a worker") for actor in self._workers]

    def generate(self, prompt: list[int], max_new_tokens: int, ignore_eos: bool = False) -> Generator[Step, None, None]:
        key = next(self._keys)
        pending = self._main.generate.options(num_returns="streaming").remote(key, prompt, max_new_tokens, ignore_eos)
        done = False
        try:
            while not done:
                ready, _ = ray.wait([pending], timeout=STEP_S)
                if not ready:
                    raise ClusterError(f"the main node has sent nothing for {STEP_S:g} s")
                following = next(pending, None)
                if following is None:
                    raise ClusterError("the main node ended the answer early; see its log")
                step: Step = get(following, STEP_S, "the main node")
                done = step.report is not None
                yield step
        finally:
            if not done:
                with contextlib.suppress(RayError):
                    self._main.cancel.remote(key)

    def close(self) -> None:
        """Stop our actors, and Ray where we started it. Bounded: a node that does not answer is killed.

        A second Ctrl-C does not cut it short: that would leave Ray's processes behind.
        """
        if threading.current_thread() is not threading.main_thread():
            self._close()
            return
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._close()
        finally:
            signal.signal(signal.SIGINT, before)

    def _close(self) -> None:
        if not ray.is_initialized():
            if self._ours:
                kill_half_started()
            return
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get([actor.stop.remote() for actor in self._actors], timeout=5.0)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        stopper = threading.Thread(target=ray.shutdown, daemon=True)
        stopper.start()
        stopper.join(20.0)
