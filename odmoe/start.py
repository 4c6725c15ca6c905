"""Starts or joins a cluster of any kind. Imports only what that kind needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from checkpoint.manifest import MANIFEST
from odmoe.clusters.process import held_ray
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError, ODMoEError

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from odmoe.clusters.base import Cluster


def start_cluster(
    settings: Settings, store: ExpertStore | None, say: Callable[[str], None] = lambda text: None
) -> Cluster:
    """A cluster embedded in this process, or of Ray actors. Without a store, a running cluster is joined whatever model
    it serves.

    Raises ClusterError, ConfigError, StoreError.
    """
    try:
        return _start(settings, store, say)
    except ODMoEError as error:
        if store is not None and not (store.path / MANIFEST).exists():  # whatever it was that missed it first
            from checkpoint.store import removal_error

            raise removal_error(store.path) from error
        raise


def _start(settings: Settings, store: ExpertStore | None, say: Callable[[str], None]) -> Cluster:
    if store is None and not settings.uses_existing_ray:
        raise ConfigError(f"--model is not given; --cluster {settings.cluster} needs one")
    if settings.cluster == "embedded" and store is not None:
        from odmoe.clusters.embedded import EmbeddedCluster

        return EmbeddedCluster(settings, store, say)
    with ExitStack() as undo:
        undo.enter_context(held_ray(settings.cluster))
        from odmoe.on_ray.cluster import RayCluster, check_unconnected

        check_unconnected()
        return RayCluster(settings, store, say, at_end=undo.pop_all().close)
