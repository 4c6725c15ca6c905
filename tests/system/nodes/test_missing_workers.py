"""All links of a main node are away for a while, in the middle of answers. About 30 seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from main_node.answer import Answer
from support.nodes.engine_world import Later
from support.nodes.served_cluster import ServedCluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
TOKENS = 40


def read(answer: Answer, times: list[float]) -> list[int | None]:
    tokens = []
    for step in answer:
        tokens.append(step.token_id)
        times.append(time.monotonic())
    return tokens[:-1]


@pytest.mark.parametrize("away_s", [1.3, 1.6, 20.0])
def test_all_links_are_away(
    away_s: float, demo_store: Callable[[str], Any], shadow_model: Callable[[str], Any], reference: Any, capsys: Any
) -> None:
    """Two open answers go on with the same tokens."""
    wanted = [reference("float32", number, TOKENS) for number in range(2)]
    cluster = ServedCluster(demo_store("float32"), shadow=shadow_model("nf4"), worker_wait_s=60.0)
    try:
        answers = [cluster.main.generate(one.prompt, TOKENS, ignore_eos=True) for one in wanted]
        times: list[list[float]] = [[], []]
        got = [Later(lambda n=n: read(answers[n], times[n])) for n in range(2)]
        while min(map(len, times)) < 4:
            time.sleep(0.01)
        cluster.away()
        threading.Event().wait(away_s)
        back = time.monotonic()
        cluster.back()
        tokens = [one.result(120.0) for one in got]
        assert tokens == [one.tokens for one in wanted]
        went_on = [min(at for at in one if at > back) - back for one in times]
        lost = len(cluster.engine.peers.lost)
        with capsys.disabled():
            print(
                f"\nlinks away for {away_s:g} s: {lost} nodes lost, next token {max(went_on):.2f} s after their return"
            )
    finally:
        cluster.close()
