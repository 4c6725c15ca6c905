"""Ends actors. Those of a lasting cluster outlive the process that made them, so they are found by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayError

from odmoe.on_ray.calls import QUICK
from odmoe.on_ray.seats import MAIN, NAMESPACE

STOP_S = 5.0
MAIN_STOP_S = 15.0  # it ends the others first
GONE_S = 5.0
LOOK_S = 0.1


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
    if MAIN not in _names():
        _end_nodes()


def stop_nodes() -> None:
    """End the main node's process, which ends the others, then those that it does not know because it is gone or has
    just been restarted."""
    with contextlib.suppress(RayError, ValueError):
        main = ray.get_actor(MAIN, NAMESPACE)
        with contextlib.suppress(RayError):
            ray.wait([main.stop.options(**QUICK).remote()], timeout=MAIN_STOP_S)
        ray.kill(main, no_restart=True)
    with contextlib.suppress(RayError):
        _end_nodes()


def _end_nodes() -> None:
    """End every node but the main node, until Ray names none, for `GONE_S` at most. Ray names an actor for a moment
    after it was killed, and one that a main node asked for just before its end only a moment later. Raises RayError."""
    deadline = time.monotonic() + GONE_S
    while (names := _names()) and time.monotonic() < deadline:
        found = []
        for name in names - {MAIN}:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found.append(ray.get_actor(name, NAMESPACE))
        end(found)
        time.sleep(LOOK_S)


def _names() -> set[str]:
    """Of the nodes that Ray knows."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return {str(actor["name"]) for actor in named if actor["namespace"] == NAMESPACE}
