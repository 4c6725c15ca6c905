"""Starting a cluster of any kind. Imports only what that kind needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from odmoe.process import prepare_ray
from odmoe.settings import Settings

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from odmoe.cluster import Cluster


def start_cluster(settings: Settings, store: ExpertStore, say: Callable[[str], None] = lambda text: None) -> Cluster:
    """Embedded in this process, or of Ray actors. Raises ClusterError."""
    if settings.cluster == "embedded":
        from odmoe.cluster import EmbeddedCluster

        return EmbeddedCluster(settings, store, say)
    prepare_ray(settings.cluster)
    from odmoe.launch import RayCluster

    return RayCluster(settings, store, say)
