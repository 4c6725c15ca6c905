"""A Ray that runs already, as far as a cluster of actors asks it before it makes any. No Ray is started.

Importing this imports Ray: `prepare_ray` comes before that.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray

from odmoe.on_ray import cluster


class MadeError(Exception):
    """Raised where the main node's process would be made: there is room for it, and none is there."""


class TakenError(Exception):
    """Raised where the main node that is there would be told to start its nodes: it is the one that is wanted."""


class PretendedRay:
    """Of some resources, with no node, or a main node that serves something. `ended`: how often all nodes were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.offered = {"CPU": 8.0, "main_node": 1.0, "shadow_node": 1.0, "worker_node": 4.0}
        self.free = dict(self.offered)
        self.serving: Any = None
        self.ended = 0
        patch.setattr(cluster, "connect_ray", lambda address: None)
        patch.setattr(cluster, "end_orphans", lambda: None)
        patch.setattr(cluster, "stop_nodes", self._stop_nodes)
        patch.setattr(cluster, "get", self._get)
        patch.setattr(cluster, "FREE_S", 0.0)
        patch.setattr(ray, "is_initialized", lambda: False)
        patch.setattr(ray, "get_actor", self._get_actor)
        patch.setattr(ray, "remote", self._remote)
        patch.setattr(ray, "cluster_resources", lambda: self.offered)
        patch.setattr(ray, "available_resources", lambda: self.free)

    def _get_actor(self, name: str, namespace: str) -> Any:
        if self.serving is None:
            raise ValueError("no actor has that name")

        def call(answer: Any) -> Any:
            return SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda: answer))

        return SimpleNamespace(serving=call(self.serving), start=call(TakenError()))

    def _get(self, pending: Any, deadline_s: float, who: str) -> Any:
        if isinstance(pending, Exception):
            raise pending
        return pending

    def _remote(self, **how: Any) -> NoReturn:
        raise MadeError

    def _stop_nodes(self) -> None:
        self.ended += 1
