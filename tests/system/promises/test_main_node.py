"""The main node freezes, and its clock jumps. What happens when it dies: tests/system/on_ray/test_local_cluster.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.faults.main_process import MainProcess

pytestmark = pytest.mark.system

HOUR_S = 3600.0


def test_the_main_node_freezes_for_four_seconds(nodes: Any, answer: Any) -> None:
    """Its workers take it for dead; they are connected again and the answer goes on."""
    main = MainProcess(nodes.settings, nodes.store.path, [worker.address for worker in nodes.workers])
    nodes.later(main.close)

    def act() -> None:
        main.freeze()
        threading.Timer(4.0, main.thaw).start()

    nodes.check_same(answer(main, {5: act}))
    nodes.check_same(answer(main))


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_clocks_jump(jump_s: float, nodes: Any, answer: Any) -> None:
    """The wall clock of two workers and the shadow, by an hour."""
    cluster = nodes.cluster(shadow=True)
    jumping = [*nodes.workers[:2], nodes.shadow]
    nodes.check_same(answer(cluster, {5: lambda: [node.set("clock", jump_s) for node in jumping]}))
    assert cluster.lost == []


def test_the_main_nodes_clock_jumps(nodes: Any, answer: Any) -> None:
    main = MainProcess(nodes.settings, nodes.store.path, [worker.address for worker in nodes.workers])
    nodes.later(main.close)
    seen = answer(main, {5: lambda: main.jump(HOUR_S), 10: lambda: main.jump(-HOUR_S)})
    nodes.check_same(seen)
