"""Reads the figures of a main node and of its peers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from main_node.figures import Figures, NodeFigures
from wire.machine import host_name

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
    nodes = _peers(engine.peers, ask=not engine.pace.emulated)
    return _of_engine(engine, answered, waiting, (own, *nodes))


def _of_engine(engine: Engine, answered: int, waiting: int, nodes: tuple[NodeFigures, ...]) -> Figures:
    totals, checks = engine.totals(), engine.checks
    return Figures(
        answered=answered,
        waiting=waiting,
        totals=totals,
        computations=checks.computations,
        audits=checks.audits.done if checks.audits else 0,
        audits_missed=tuple(sorted(dict(checks.audits.missed).items())) if checks.audits else (),  # a copy: it may grow
        nodes=nodes,
    )


def _peers(peers: Peers, ask: bool) -> tuple[NodeFigures, ...]:
    """`ask`: the nodes what they hold. Not in emulated time, which counts each message."""
    usage = peers.last_usage(FIRST_S) if ask else {}
    suspects = peers.suspected()
    return tuple(
        replace(
            node,
            memory_bytes=usage.get(node.name),
            suspect=node.role == "worker" and node.number in suspects,
        )
        for node in peers.roster.figures()
    )
