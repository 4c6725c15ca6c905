"""Clients that go away, and many of them. What signals do: tests/odmoe/commands/shared/test_{interrupted,process}.py"""

from __future__ import annotations

import collections
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from odmoe.stores import prepare_store
from support.faults.cluster import ask
from support.promises import PROMPT, TOKENS

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CLIENTS = 1000
FEW = 4
"""Tokens that each of the clients asks for."""
WAIT_S = 120.0
ABANDONED = 60


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    store = prepare_store(str(tiny), str(tmp_path_factory.mktemp("clients") / "store"), "float32")
    made = EmbeddedCluster(
        Settings(model=str(tiny), workers=3, threads=1, shadow="none", loader="memory", parallel=8, queue=64), store
    )
    yield made
    made.close()


def settled(cluster: Any) -> bool:
    """No request is open."""
    main = cluster.main
    return bool(main.engine.idle() and main.steps.idle() and main.admission.counts() == (0, 0))


def wait_until_settled(cluster: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not settled(cluster) and time.monotonic() < end:
        time.sleep(0.01)
    assert settled(cluster)


def test_a_thousand_clients_at_once(cluster: Any, nodes: Any) -> None:
    """Each gets its whole answer or is refused at once, by name; afterwards the cluster serves as before."""
    ended: collections.Counter[str] = collections.Counter()
    counting, gate = threading.Lock(), threading.Event()

    def client() -> None:
        gate.wait()
        seen = ask(cluster.main, PROMPT, FEW)
        with counting:
            ended[type(seen.error).__name__ if seen.error else str(seen.tokens == nodes.expected[:FEW])] += 1

    threads = [threading.Thread(target=client, daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    gate.set()
    end = time.monotonic() + WAIT_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert sum(ended.values()) == CLIENTS, ended
    assert set(ended) <= {"True", "QueueFullError"}
    assert ended["True"] >= 8 + 64
    wait_until_settled(cluster)
    assert ask(cluster.main, PROMPT, TOKENS).tokens == nodes.expected


def test_clients_that_go_away(cluster: Any, nodes: Any) -> None:
    """Answers that are begun and dropped, with the cyclic garbage collector off: each is closed, its caches freed."""
    gc.disable()
    try:
        for number in range(ABANDONED):
            answer = cluster.main.generate(PROMPT, TOKENS, ignore_eos=True)
            for _ in range(number % 3):
                next(answer)
            del answer
        wait_until_settled(cluster)
    finally:
        gc.enable()
    assert ask(cluster.main, PROMPT, TOKENS).tokens == nodes.expected
