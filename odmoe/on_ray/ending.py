"""Ending actors. Those of a lasting cluster outlive whoever made them: they are found by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayError

from odmoe.on_ray.calls import QUICK
from odmoe.on_ray.seats import MAIN, NAMESPACE

STOP_S = 5.0
MAIN_STOP_S = 15.0  # it ends the others first


def end(actors: Collection[Any]) -> None:
    """Stop nodes, and end their processes for good. Bounded: one that does not answer is killed."""
    with contextlib.suppress(RayError):
        stops = [actor.stop.remote() for actor in actors]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)


def end_others() -> None:
    """Every node but the main one, whoever has made it. Raises RayError."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"] != MAIN:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found.append(ray.get_actor(actor["name"], NAMESPACE))
    end(found)


def stop_nodes() -> None:
    """End the main node's process and, by it, those of the others; then those that it does not know of, because it is
    gone, or was made anew a moment ago."""
    with contextlib.suppress(RayError, ValueError):
        main = ray.get_actor(MAIN, NAMESPACE)
        with contextlib.suppress(RayError):
            ray.wait([main.stop.options(**QUICK).remote()], timeout=MAIN_STOP_S)
        ray.kill(main, no_restart=True)
    with contextlib.suppress(RayError):
        end_others()
