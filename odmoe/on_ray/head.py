"""The head's side of `odmoe up`, `status` and `down`: one line of JSON from the launching machine, lines in answer."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from checkpoint.store import ExpertStore
from odmoe.machines.head import NODE_UNKNOWN
from odmoe.on_ray.calls import QUICK, get
from odmoe.on_ray.cluster import RayCluster, connect_ray
from odmoe.on_ray.seats import MAIN, NAMESPACE, hosts_of_launcher
from odmoe.on_ray.shutdown import stop_nodes
from odmoe.settings.settings import Settings
from scheduler.errors import ClusterError, LaunchError, ODMoEError

EVERY_S = 1.0
ANSWER_S = 5.0
KIND_OF = {"worker_node": "worker", "shadow_node": "shadow"}


def start(settings: Settings, store: Path) -> Iterator[dict[str, Any]]:
    """Start the nodes, or find them running. Yields a snapshot a second until all are ready or one has failed."""
    opened = ExpertStore.open(store)
    failure: list[ODMoEError] = []
    made: list[RayCluster] = []

    def run() -> None:
        try:
            made.append(RayCluster(settings, opened, replace=True))
        except ODMoEError as error:
            failure.append(error)
        except Exception as error:  # noqa: BLE001 - reported below, as every error of the start
            failure.append(ClusterError(f"the nodes were not started: {error!r}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while True:
        thread.join(EVERY_S)
        seen = snapshot() if ray.is_initialized() and not failure else {"hosts": [], "ready": False}
        error = {"type": type(failure[0]).__name__, "message": str(failure[0])} if failure else None
        yield {**seen, "ready": seen["ready"] and not thread.is_alive() and not failure, "error": error}
        if failure or (seen["ready"] and made):
            return


def status() -> dict[str, Any]:
    """One snapshot. Raises LaunchError if no Ray runs."""
    connect_ray("auto")
    served = None
    with contextlib.suppress(ValueError, ClusterError):
        served = get(ray.get_actor(MAIN, NAMESPACE).serving.options(**QUICK).remote(), ANSWER_S, MAIN)
    return {**snapshot(), "error": None, "fingerprint": served.fingerprint if served else None}


def stop() -> None:
    """End the nodes; Ray keeps running."""
    connect_ray("auto")
    stop_nodes()


def snapshot() -> dict[str, Any]:
    """Every expected or joined host: whether Ray runs on it, and its node's state."""
    declared_hosts = hosts_of_launcher()
    with contextlib.suppress(RayError):
        nodes = ray.nodes()
        alive = {str(node["NodeManagerAddress"]): bool(node["Alive"]) for node in sorted(nodes, key=_is_alive)}
        roles = {str(node["NodeManagerAddress"]): _role(node) for node in nodes if node["Alive"]}
        main, facts = _nodes()
        found = {(fact["address"], fact["kind"]): fact for fact in facts}
        rows = []
        for address in [*declared_hosts, *(address for address in roles if address not in declared_hosts)]:
            host = declared_hosts.get(address)
            role = host.role if host else roles[address]
            there = {None: "missing", True: "alive", False: "dead"}[alive.get(address)]
            row = {"address": address, "role": role, "number": host.number if host else None, "ray": there}
            rows.append({**_EMPTY, **row, **_state(role, there, main, found.get((address, KIND_OF.get(role, ""))))})
        wanted = [row for row in rows if row["state"] != "unused"]
        return {"hosts": rows, "ready": bool(wanted) and all(row["state"] == "ready" for row in wanted)}
    return {"hosts": [], "ready": False}


_EMPTY: dict[str, Any] = {"detail": "", **NODE_UNKNOWN}


def _state(role: str, there: str, main: str, fact: dict[str, Any] | None) -> dict[str, Any]:
    if role == "main_node":
        return {"state": main, "store": "verified" if main == "ready" else ""}
    if fact is None:
        return {"state": "unused" if main == "ready" and there == "alive" else "waiting"}
    known = {key: fact[key] for key in _EMPTY if key in fact}
    if fact.get("slot_bytes"):
        known["memory_bytes"] = fact["slots"] * fact["slot_bytes"]
    return {**known, "state": fact["state"], "store": "verified" if fact["state"] == "ready" else ""}


def _nodes() -> tuple[str, list[dict[str, Any]]]:
    """The main node's state, and its facts about the other nodes."""
    try:
        main = ray.get_actor(MAIN, NAMESPACE)
        facts = list(get(main.nodes.options(**QUICK).remote(), ANSWER_S, MAIN))
    except ValueError:
        return "waiting", []
    except ClusterError:
        return "starting", []
    return ("ready" if facts else "starting"), facts


def _is_alive(node: dict[str, Any]) -> bool:
    return bool(node["Alive"])


def _role(node: dict[str, Any]) -> str:
    return next((role for role in ("main_node", *KIND_OF) if node["Resources"].get(role)), "none")


def say(line: dict[str, Any]) -> None:
    """Print a line of JSON for the launching machine."""
    print(json.dumps(line), flush=True)


def serve(request: dict[str, Any], settings: Callable[[dict[str, Any]], Settings]) -> int:
    """Serve one request. `settings` gives the effective settings on this host for those sent. Returns the exit code."""
    try:
        if request.get("do") == "start":
            wanted = settings({**request["settings"], "cluster": "auto", "model": request["store"]})
            for line in start(wanted, Path(request["store"]).expanduser()):
                say(line)
        elif request.get("do") == "status":
            say(status())
        elif request.get("do") == "stop":
            stop()
        else:
            what = request.get("do")
            raise LaunchError(f"the launcher asks for {what!r}, which this host does not know; ship its code again")
    except ODMoEError as error:
        say({"hosts": [], "ready": False, "error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    finally:
        sys.stdout.flush()
    return 0
