"""Ends actors. Those of a lasting cluster outlive the process that made them, so they are found by name."""

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
    """Stop nodes and end their processes for good. One that does not answer in time is killed."""
    with contextlib.suppress(RayError):
        stops = [actor.stop.remote() for actor in actors]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)


def end_orphans() -> None:
    """If there is no main node, end the nodes of an earlier one: they occupy seats, with that one's settings. Raises
    RayError."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [str(actor["name"]) for actor in named if actor["namespace"] == NAMESPACE]
    if MAIN in names:
        return
    found = []
    for name in names:
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            found.append(ray.get_actor(name, NAMESPACE))
    end(found)


def stop_nodes() -> None:
    """End the main node's process, which ends the others, then those that it does not know because it is gone or has
    just been restarted."""
    with contextlib.suppress(RayError, ValueError):
        main = ray.get_actor(MAIN, NAMESPACE)
        with contextlib.suppress(RayError):
            ray.wait([main.stop.options(**QUICK).remote()], timeout=MAIN_STOP_S)
        ray.kill(main, no_restart=True)
    with contextlib.suppress(RayError):
        end_orphans()
