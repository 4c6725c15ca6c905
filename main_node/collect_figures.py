"""Reads the figures of a main node and of its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from main_node.activity import Activity
from main_node.figures import Figures, NodeFigures
from wire.machine import host_name
from wire.messages import ShadowUsage, WorkerUsage

if TYPE_CHECKING:
    from main_node.engine.engine import Engine
    from main_node.engine.peers import Peers
    from main_node.node import MainNode

FIRST_S = 0.25
"""How long a node is waited for that has not said yet what it holds."""


def figures_of(main: MainNode) -> Figures:
    """The figures of a cluster, from any thread. Waits for no pass, and for no node for more than `FIRST_S`."""
    engine, (answered, waiting) = main.engine, main.admission.counts()
    own = NodeFigures("main", 0, True, host_name(), main.device_text, memory_bytes=main.device_bytes)
    usage = _usage(engine)
    workers = [one for one in usage.values() if isinstance(one, WorkerUsage)]
    nodes = (own, *_peers(engine.peers, usage))
    return Figures(answered, waiting, engine.totals(), engine.cluster_figures(workers), nodes)


def activity_of(main: MainNode, since: int | None) -> Activity:
    """What the cluster does now, from any thread. Waits for no pass and no node."""
    answered, waiting = main.admission.counts()
    return replace(main.engine.activity(since), answered=answered, waiting=waiting)


def _usage(engine: Engine) -> dict[str, WorkerUsage | ShadowUsage]:
    """What the nodes hold, by their names. Empty in emulated time, which counts each message."""
    return {} if engine.pace.profile_name else engine.peers.last_usage(FIRST_S)


def _peers(peers: Peers, usage: Mapping[str, WorkerUsage | ShadowUsage]) -> tuple[NodeFigures, ...]:
    suspects = peers.suspected_workers()
    return tuple(
        replace(
            node,
            memory_bytes=usage[node.name].device_bytes_max if node.name in usage else None,
            suspect=node.role == "worker" and node.number in suspects,
        )
        for node in peers.roster.figures()
    )
