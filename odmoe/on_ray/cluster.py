"""A cluster of Ray actors: on this machine (`local`), or on a running Ray cluster, where the nodes outlive this process
and the next one finds them.

A node is placed on a host that offers its role as a resource: `main_node`, `shadow_node` or `worker_node`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # of a compiled module
from ray.exceptions import ActorAlreadyExistsError, RayError

from checkpoint.store import ExpertStore
from main_node.activity import Activity
from main_node.figures import Figures
from main_node.sampling import GenerateOptions
from odmoe.clusters.process import ignore_signals
from odmoe.on_ray.actors import Main, Serving
from odmoe.on_ray.answers import HELD_S, LOOKS
from odmoe.on_ray.calls import CONTROL_S, GROUPS, QUICK, START, HeldAnswers, RayAnswer, get, get_unless
from odmoe.on_ray.host import check_reachable, check_running, check_token, kill_half_started, warn_if_no_token
from odmoe.on_ray.ray_start import first_line, kept_sigterm, start_patiently
from odmoe.on_ray.seats import MAIN, NAMESPACE, hosts_of_launcher
from odmoe.on_ray.shutdown import end_orphans, stop_nodes
from odmoe.settings.derived import FIXED_BY_UP, FIXED_WHILE_RUNNING, FROM_CLUSTER, OUTPUT_FILES
from odmoe.settings.settings import Settings
from odmoe.settings.table import flag
from odmoe.terminal import count_text
from scheduler.errors import LaunchError, LinkError, ODMoEError
from scheduler.trace import Span

FREE_S = 15.0
LOOK_S = 1.0
"""Between two looks whether this cluster was closed."""
REST_S = 60.0  # how long a first answer waits for the slowest nodes
RECORD_S = 60.0  # how long trace and recording may take
FIGURES_S = 4.0  # how long figures may take: who asks for them does so often, and waits


class RayCluster:
    """One actor for each node. `local` starts Ray on this machine and stops it again. Otherwise Ray must be running,
    and nodes that already run are used. With `store` None any served model will do.

    `replace` restarts running nodes whose settings differ from `settings`. `at_end` is called when this is closed, also
    where it does not start.
    """

    def __init__(
        self,
        settings: Settings,
        store: ExpertStore | None,
        say: Any = lambda text: None,
        replace: bool = False,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._main: Any = None
        self._ours = self._ends = settings.cluster == "local"
        self._replace = replace
        self._say = say
        self._at_end = at_end
        self._answers = HeldAnswers()
        self._fingerprint: str | None = None
        """Of the model that was served when it was last asked for."""
        self._worker_wait_s = settings.worker_wait
        self._closed, self._closing = threading.Event(), threading.Lock()
        say("starting Ray" if self._ours else "connecting to Ray")
        try:
            self._connect(settings)
            if not self._attach(settings, store):
                if store is None:
                    raise LaunchError("no model is served on this cluster; odmoe up starts its nodes")
                workers = count_text(settings.workers, "worker") if settings.workers_given else "all workers"
                say(f"starting the main node, {workers}{' and the shadow' * settings.has_shadow}")
                self._start(settings, str(store.path.resolve()))
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._hold, args=(self._main,), name="cluster-hold", daemon=True).start()

    def _connect(self, settings: Settings) -> None:
        if not self._ours:
            connect_ray(settings.cluster)
            return
        if os.environ.get("RAY_AUTH_MODE") != "token":
            raise LaunchError("Ray was imported before prepare_ray('local'); start clusters by odmoe.start")
        roles = {"main_node": 1, "shadow_node": settings.shadow_processes, "worker_node": settings.workers}

        def start() -> None:
            ray.init(
                address="local",
                num_cpus=sum(roles.values()),  # Ray prestarts this many processes
                num_gpus=0,
                resources=roles,
                include_dashboard=False,
                object_store_memory=80 << 20,
                **_common(),
            )

        try:
            start_patiently(start, self._say)
        except Exception as error:  # Ray raises Exception itself where a process of its own does not start in time
            reason = first_line(error)
            raise LaunchError(f"Ray does not start on this machine: {reason}; use --cluster embedded") from error

    def _attach(self, settings: Settings, store: ExpertStore | None) -> bool:
        """Whether nodes run here already and will be used. Raises LaunchError if they differ from what is requested."""
        try:
            self._main = ray.get_actor(MAIN, NAMESPACE)
        except ValueError:
            return False
        try:
            serving = self._serving(settings.launch_s)
            self._worker_wait_s = serving.settings.worker_wait
            unlike = _differs(serving, settings, store, whole=self._replace)
        except ODMoEError as error:  # its store was removed, for example
            if not self._replace:
                raise
            unlike = str(error)
        if unlike and self._replace:
            self._say(f"ending the running nodes: {unlike}")
            stop_nodes()
            return False
        if unlike:
            raise LaunchError(f"{unlike}; odmoe up with these settings changes that")
        get(self._main.start.options(**START).remote(), 2 * settings.launch_s, "the main node")
        self._wait_for_nodes(settings, rest_s=REST_S if self._replace else 0.0)
        return True

    def _start(self, settings: Settings, store: str) -> None:
        if settings.uses_existing_ray:
            end_orphans()
        self._check_room(settings)
        self._worker_wait_s = settings.worker_wait
        if not settings.uses_existing_ray:
            settings = settings.replace(secret=settings.secret or secrets.token_hex(16))
        lasting = {"lifetime": "detached"} if settings.uses_existing_ray else {}
        groups: dict[str, Any] = {"concurrency_groups": GROUPS}
        made = ray.remote(**groups)(Main).options(
            name=MAIN,
            namespace=NAMESPACE,
            num_cpus=0,
            resources={"main_node": 1},
            max_concurrency=settings.parallel + settings.queue + 1,  # one more, which hears that the queue is full
            max_restarts=-1 if settings.uses_existing_ray else 0,
            max_task_retries=0,
            **lasting,
        )
        try:
            self._main = made.remote(settings, store)
        except ActorAlreadyExistsError as error:
            raise LaunchError("another process is starting nodes on this cluster; try again") from error
        ended, self._ends = self._ends, True  # a failed start leaves nothing behind
        get(self._main.start.options(**START).remote(), 2 * settings.launch_s, "the main node")
        self._wait_for_nodes(settings, REST_S)
        self._ends = ended

    def _wait_for_nodes(self, settings: Settings, rest_s: float) -> None:
        """Wait until every node is ready, or until `rest_s` after the first worker. Raises LaunchError if no worker is
        ready within `launch_s`. For `local` the main node has already waited."""
        begun, serves = time.monotonic(), None
        while settings.uses_existing_ray:
            nodes = self.nodes()
            missing = [node for node in nodes if node["state"] != "ready"]
            if nodes and not missing:
                return
            self._say(f"{len(nodes) - len(missing)} of {len(nodes)} workers and shadow are ready")
            now = time.monotonic()
            if serves is None and any(node["kind"] == "worker" and node["state"] == "ready" for node in nodes):
                serves = now
            if serves is not None and now - serves >= rest_s:
                return
            if now - begun > settings.launch_s:
                why = "; ".join(f"{node['name']}: {node['detail'] or node['state']}" for node in missing)
                raise LaunchError(f"no worker was ready within {settings.launch_s:g} s: {why or 'there is none'}")
            time.sleep(0.5)

    def _check_room(self, settings: Settings) -> None:
        """Check that there are enough hosts of each role, free within FREE_S: those of an ended run take a while."""
        wanted = {"main_node": 1, "shadow_node": settings.shadow_processes}
        wanted["worker_node"] = settings.workers if settings.workers_given else 1
        if settings.uses_existing_ray and hosts_of_launcher():  # the launcher is starting the others
            wanted = {"main_node": 1}
        found = ray.cluster_resources()
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

    def _hold(self, main: Any) -> None:
        """While this process lives, renew the answers that it reads, and cancel those that it has dropped."""
        renewal = time.monotonic()
        while not self._closed.is_set():
            dropped = self._answers.next_dropped(min(LOOK_S, max(0.0, renewal - time.monotonic())))
            main = self._main or main  # another one after `rejoin`
            with contextlib.suppress(RayError):
                if dropped is not None:
                    main.cancel.options(**QUICK).remote(dropped)
                if time.monotonic() >= renewal:
                    renewal = time.monotonic() + HELD_S / LOOKS
                    if keys := self._answers.keys():
                        main.hold.options(**QUICK).remote(keys)

    def pid(self, name: str) -> int:
        """Process id of `worker N`, `shadow` or `main node`, for fault tests. Raises LinkError while it is gone."""
        if name == MAIN:
            return int(get(self._main.pid.options(**QUICK).remote(), CONTROL_S, name))
        kind, _, number = name.partition(" ")
        seat = next(node for node in self.nodes() if (node["kind"], node["number"]) == (kind, int(number or 0)))
        return int(get(ray.get_actor(seat["name"], NAMESPACE).pid.remote(), CONTROL_S, name))

    def nodes(self) -> list[dict[str, Any]]:
        """Every worker and the shadow, with host and state."""
        return list(get(self._main.nodes.options(**QUICK).remote(), CONTROL_S, "the main node"))

    def store(self) -> Path:
        """The store of the served model, at the same path on every host."""
        return Path(self._serving(CONTROL_S).store)

    def serves(self) -> Settings:
        """The settings of the running nodes."""
        return self._serving(CONTROL_S).settings

    def _serving(self, deadline_s: float) -> Serving:
        served: Serving = get(self._main.serving.options(**QUICK).remote(), deadline_s, "the main node")
        self._fingerprint = served.fingerprint
        return served

    def rejoin(self, within_s: float, given_up: threading.Event) -> None:
        """Find the main node again after its process was lost, and wait until it is ready.

        Raises LinkError if it is not there yet, LaunchError if it does not start or serves another model,
        RequestCancelledError soon after `given_up` is set.
        """
        fingerprint = self._fingerprint
        try:
            self._main = ray.get_actor(MAIN, NAMESPACE)
        except ValueError as error:
            raise LinkError("there is no main node; odmoe up starts one") from error
        get_unless(given_up, self._main.start.options(**START).remote(), within_s, "the main node")
        served = self._serving(CONTROL_S)
        if fingerprint not in (None, served.fingerprint):
            raise LaunchError(f"the main node was lost, and the cluster serves another model now, {served.store}")

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Unpack[GenerateOptions]) -> RayAnswer:
        request = {"prompt": prompt, "max_new_tokens": max_new_tokens, **how}
        return RayAnswer(self._main, secrets.token_hex(8), request, self._answers, self._worker_wait_s)

    def changes(self, since: int | None) -> tuple[int, list[str]]:
        count, lines = get(self._main.changes.options(**QUICK).remote(since), CONTROL_S, "the main node")
        return int(count), list(lines)

    def figures(self) -> Figures:
        found: Figures = get(self._main.figures.options(**QUICK).remote(), FIGURES_S, "the main node")
        return found

    def activity(self, since: int | None) -> Activity:
        found: Activity = get(self._main.activity.options(**QUICK).remote(since), FIGURES_S, "the main node")
        return found

    def trace(self) -> list[Span]:
        return list(get(self._main.trace.options(**QUICK).remote(), RECORD_S, "the main node"))

    def recording(self) -> bytes:
        return bytes(get(self._main.recording.options(**QUICK).remote(), RECORD_S, "the main node"))

    def close(self) -> None:
        """Stop the nodes unless they are to last, and Ray if we started it. A node that does not answer in time is
        killed. A second Ctrl-C does not interrupt this, or Ray's processes would be left behind."""
        with self._closing:
            if self._closed.is_set():  # what runs on this process's Ray now may be another's
                return
            self._closed.set()
            try:
                with ignore_signals():
                    self._leave_ray()
            finally:
                self._at_end()

    def _leave_ray(self) -> None:
        if not ray.is_initialized():
            if self._ours:
                kill_half_started(str(Path(ray.__file__).parent))
            return
        if self._ends and self._main is not None:
            stop_nodes()
        self._main = None
        stopper = threading.Thread(target=ray.shutdown, daemon=True)
        stopper.start()
        stopper.join(20.0)


def _common() -> dict[str, Any]:
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # those of cancelled answers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}


def check_unconnected() -> None:
    """Raises LaunchError where this process is connected to Ray: to leave it would end what others do with it."""
    if ray.is_initialized():
        raise LaunchError(
            "this process is connected to Ray already, by its own ray.init or by a model that is open; close that "
            "first (ray.shutdown), or load the model in a process of its own"
        )


def connect_ray(address: str) -> None:
    """Connect to a running Ray cluster: `auto` or host:port. Raises LaunchError."""
    if address == "auto":
        address = check_running(_address_here())
    else:
        check_reachable(address)
    check_token(address, _token())
    try:
        with kept_sigterm():
            ray.init(address=address, **_common())
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"no Ray cluster at {address!r}: {reason}; start one, or use --cluster local") from error
    warn_if_no_token(ray.get_runtime_context().gcs_address)


def _token() -> dict[str, str]:
    """The headers by which Ray's clients here say their token; none where they have none."""
    try:
        return dict(AuthenticationTokenLoader.instance().get_token_for_http_header())
    except RayError:  # RAY_AUTH_MODE=token, and no token
        return {}


def _address_here() -> str | None:
    """The address that `ray.init` would take for `auto`: RAY_ADDRESS, or that of this host's Ray."""
    try:
        return canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError, OSError):
        return None


def _differs(served: Serving, wanted: Settings, store: ExpertStore | None, whole: bool = False) -> str | None:
    """The first difference between the running nodes and the given settings, in words; None if there is none. With
    `whole`, settings that were not given count as their defaults."""
    if store is not None and store.manifest.model_digest != served.fingerprint:
        return f"the cluster serves another model, {served.store}"
    for name in (*FIXED_WHILE_RUNNING, *FIXED_BY_UP) if whole else FIXED_WHILE_RUNNING:
        runs, asked = served.dtype if name == "dtype" else getattr(served.settings, name), getattr(wanted, name)
        given = name in wanted.model_fields_set
        if not given and name in FROM_CLUSTER:
            if whole and name == "dtype" and store is not None and store.manifest.dtype != runs:
                return f"the cluster serves with {flag(name)} {runs}, not {store.manifest.dtype} as the model has it"
            if whole and name == "workers" and name in served.settings.model_fields_set:
                return f"the cluster serves with {flag(name)} {runs}, not with all that it has"
        elif (given or whole) and runs != asked:
            return f"the cluster serves with {flag(name)} {runs}, not {asked}"
    for name in OUTPUT_FILES:
        if getattr(wanted, name) is not None and getattr(served.settings, name) is None:
            return f"the cluster's nodes keep no record for {flag(name)}"
    return None
