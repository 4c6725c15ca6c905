"""The cluster of one process: what tests/test_exact.py does not check of its answers."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest

from main_node.answer import collect
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings


def test_closed_while_its_shadow_is_made(demo_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shadow comes too late: it joins nobody."""
    making, go = threading.Event(), threading.Event()
    joined: list[Any] = []

    class Shadow:
        def accept(self, reply: Any) -> None:
            joined.append(reply)

    def make_shadow(settings: Settings, store: Any, emulation: Any) -> Shadow:
        making.set()
        assert go.wait(60)
        return Shadow()

    monkeypatch.setattr("odmoe.clusters.embedded.make_shadow", make_shadow)
    cluster = EmbeddedCluster(Settings(model="demo", shadow="nf4", threads=1, workers=2), demo_store("bfloat16"))
    with closing(cluster.generate([5, 6, 7], 8)) as steps:
        next(steps)
        assert making.wait(60)
    cluster.close()
    go.set()
    for thread in threading.enumerate():
        if thread.name == "shadow-start":
            thread.join(60)
            assert not thread.is_alive()
    assert cluster.main.engine.peers.shadow is None
    assert joined == []


@pytest.mark.slow
def test_threads_end_with_the_cluster(demo_store: Any) -> None:
    before = set(threading.enumerate())
    cluster = EmbeddedCluster(Settings(model="demo", shadow="nf4", threads=1, workers=2), demo_store("bfloat16"))
    assert len(collect(cluster.generate([5, 6, 7], 4, ignore_eos=True))[0]) == 4
    cluster.close()
    left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert left == []


def test_an_answer_of_one_token(demo_store: Any) -> None:
    """Nothing is decoded, so there is no rate, and no shadow is waited for."""
    said: list[str] = []
    settings = Settings(model="demo", shadow="none", threads=1, workers=1)
    cluster = EmbeddedCluster(settings, demo_store("bfloat16"), said.append)
    assert said[0] == "loading the main model and 1 worker"
    tokens, report = collect(cluster.generate([5, 6, 7], 1))
    cluster.close()
    assert len(tokens) == 1
    assert (report.new_tokens, report.decode_tokens_per_s, report.recall) == (1, None, None)
