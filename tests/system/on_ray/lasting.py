"""Run by test_lasting.py in a process of its own, since importing ray settles how it authenticates: a cluster of
actors that last, on a Ray that runs already, and what becomes of it. Prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odmoe.clusters.process import prepare_ray

prepare_ray("auto")

import ray  # noqa: E402

import odmoe  # noqa: E402
from checkpoint.store import ExpertStore  # noqa: E402
from odmoe.on_ray.cluster import RayCluster, connect_ray  # noqa: E402
from odmoe.on_ray.seats import MAIN, NAMESPACE  # noqa: E402
from odmoe.on_ray.shutdown import stop_nodes  # noqa: E402
from odmoe.settings.settings import Settings  # noqa: E402
from scheduler.errors import ODMoEError  # noqa: E402

WAIT_S = 90.0
COMMON: dict[str, Any] = {"shadow": "none", "threads": 1, "launch_timeout": 120}


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            if value := found():
                return value
        except (ODMoEError, ValueError):
            pass
        time.sleep(0.2)
    raise TimeoutError(found)


def open_cluster(address: str, store: Path | None, **changes: Any) -> RayCluster:
    settings = Settings(cluster=address, **({**COMMON, **changes} if store else {}))
    return RayCluster(settings, ExpertStore.open(store) if store else None)


def answer(cluster: RayCluster, prompt: list[int]) -> list[int]:
    *_, last = cluster.generate(prompt, 6, ignore_eos=True)
    return list(last.report.token_ids)


def pids(cluster: RayCluster) -> list[int]:
    return [cluster.pid(name) for name in ("main node", "worker 0", "worker 1")]


def named() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def begun(address: str, store: Path, **changes: Any) -> str:
    """The error that a start ends with."""
    try:
        open_cluster(address, store, **changes).close()
    except ODMoEError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loaded(address: str, store: Path | None, prompt: list[int]) -> tuple[list[int], list[int]]:
    """The answer of a model as a Python program loads it, and its nodes' process ids."""
    with odmoe.load(store, address, **(COMMON if store else {})) as model:
        return list(model.generate(prompt, max_new_tokens=6, ignore_eos=True).token_ids), pids(model.cluster)


def main(address: str, store: Path, prompt: list[int]) -> dict[str, Any]:
    told: dict[str, Any] = {}

    found = [loaded(where, model, prompt) for model, where in ((store, "auto"), (store, address), (None, "auto"))]
    told["answers"], of_each = zip(*found, strict=True)
    told["pids"], *told["pids again"] = of_each
    told["dtype"] = [begun(address, store, dtype=dtype) for dtype in ("float32", "bfloat16")]
    cluster = open_cluster(address, None)

    os.kill(told["pids"][0], signal.SIGKILL)
    told["states"] = until(lambda: [node["state"] for node in cluster.nodes() if node["state"] == "ready"])
    told["third"], told["pids after"] = answer(cluster, prompt), pids(cluster)

    # A main node that is gone for good, and its workers not: whoever starts next wants other ones.
    ray.kill(ray.get_actor(MAIN, NAMESPACE), no_restart=True)
    told["orphans"] = named()
    cluster.close()
    cluster = open_cluster(address, store, slots=2)
    until(lambda: all(node["state"] == "ready" for node in cluster.nodes()))
    told["slots"] = [node["slots"] for node in cluster.nodes()]
    told["fourth"] = answer(cluster, prompt)

    # A worker's actor that is gone for good is made anew.
    worker = cluster.nodes()[0]["name"]
    before = cluster.pid("worker 0")
    ray.kill(ray.get_actor(worker, NAMESPACE), no_restart=True)
    told["made anew"] = until(lambda: cluster.pid("worker 0") != before and answer(cluster, prompt))

    # A main node that was made anew a moment ago does not know its workers yet.
    os.kill(cluster.pid(MAIN), signal.SIGKILL)
    stop_nodes()
    told["left"] = named()
    cluster.close()

    told["refused"] = begun(address, store, ctx_size=1 << 30)
    connect_ray(address)
    told["left of refused"] = named()
    return told


if __name__ == "__main__":
    try:
        print("told " + json.dumps(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))), flush=True)
    finally:
        if ray.is_initialized():
            stop_nodes()
    os._exit(0)
