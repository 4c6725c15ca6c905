"""A shadow whose layers are in two processes, started by `--shadow-hosts 2` on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from odmoe.settings.settings import Settings
from odmoe.start import start_cluster

pytestmark = pytest.mark.system

TOKENS = 24
BACK_S = 180.0
PARTS = ("shadow", "shadow 1")


@pytest.fixture(scope="module")
def cluster(demo_store: Callable[[str], Any]) -> Iterator[Any]:
    settings = Settings(
        model="demo", cluster="local", workers=1, shadow="nf4", threads=1, shadow_hosts=2, departure="late"
    )
    made = start_cluster(settings, demo_store("float32"))
    yield made
    made.close()


def test_the_same_tokens_when_a_part_is_killed(cluster: Any, reference: Any) -> None:
    expected = reference("float32", 0, TOKENS)
    *_, last = cluster.generate(expected.prompt, TOKENS, ignore_eos=True)
    assert last.report.token_ids == expected.tokens
    assert last.report.recall > 0.9
    pids = {cluster.pid(name) for name in PARTS}
    assert len(pids) == len(PARTS)

    steps = cluster.generate(expected.prompt, TOKENS, ignore_eos=True)
    tokens = [next(steps).token_id for _ in range(5)]
    os.kill(cluster.pid(PARTS[1]), signal.SIGKILL)
    tokens += [step.token_id for step in steps if step.token_id is not None]
    assert tokens == expected.tokens

    end = time.monotonic() + BACK_S
    while any(node["state"] != "ready" for node in cluster.nodes()):
        assert time.monotonic() < end, cluster.nodes()
        time.sleep(0.2)
    *_, last = cluster.generate(expected.prompt, TOKENS, ignore_eos=True)
    assert last.report.token_ids == expected.tokens
    assert last.report.recall > 0.9
