"""Answers that are given up, and shadows that come late or not at all."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from main_node.answer import Step, collect
from main_node.shadow_start import ShadowStart
from scheduler.errors import HandshakeError, LaunchError
from shadow_node.model import ShadowModel
from support.nodes.engine_world import WAIT_S
from support.nodes.tapped_cluster import WORKERS, TappedCluster
from wire import messages as w
from wire.lent_threads import LentThreads

pytestmark = pytest.mark.timeout(90)
TOKENS = 8


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_early_leaves_nothing(taken: int, cluster: TappedCluster, nf4: ShadowModel, expected: Any) -> None:
    told = cluster.join_shadow(nf4)
    steps = cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    for _ in range(taken):
        next(steps)
    steps.close()
    cluster.nothing_left()
    opened, closed = (sum(isinstance(m, kind) for m in told.sent) for kind in (w.OpenRequest, w.CloseRequest))
    assert opened == closed == (taken > 0)
    cache = weakref.ref(steps.request.sequence.cache)
    del steps
    gc.collect()
    assert cache() is None, "nobody keeps the cache of an answer that is over"
    assert cluster.answer(expected.prompt, 3, ignore_eos=True)[0] == expected.tokens[:3]


def test_an_interrupt_within_a_layer_leaves_the_cluster_well(
    cluster: TappedCluster, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a layer waits: its workers still answer, the next request is served."""
    waited = 0

    class Interrupted(LentThreads):
        def run_until(self, done: Callable[[], bool], within_s: float) -> bool:
            nonlocal waited
            waited += 1
            if waited == 11:
                raise KeyboardInterrupt
            return super().run_until(done, within_s)

    monkeypatch.setattr(cluster.engine, "lent", Interrupted())
    steps = cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    cluster.nothing_left()
    assert cluster.answer(expected.prompt, 3, ignore_eos=True)[0] == expected.tokens[:3]
    assert len(cluster.engine.peers.workers) == WORKERS


def test_a_shadow_that_does_not_come_up_is_named(cluster_of: Any, expected: Any) -> None:
    cause = HandshakeError("shadow has dtype float16")

    def join() -> None:
        raise cause

    cluster = cluster_of(shadow=ShadowStart(join))
    for _ in range(2):
        steps = cluster.main.generate(expected.prompt[:20], TOKENS, ignore_eos=True)
        next(steps)
        with pytest.raises(LaunchError, match="the shadow did not start: shadow has dtype float16") as raised:
            next(steps)
        assert raised.value.__cause__ is cause
        cluster.nothing_left()
    assert len(cluster.answer(expected.prompt[:20], 1)[0]) == 1  # that needs no predictions


def test_a_shadow_that_takes_too_long_is_named(cluster_of: Any, expected: Any) -> None:
    release = threading.Event()
    cluster = cluster_of(shadow=ShadowStart(lambda: release.wait(WAIT_S) and None))
    cluster.main.launch_s = 0.05
    steps = cluster.main.generate(expected.prompt[:20], TOKENS, ignore_eos=True)
    next(steps)
    with pytest.raises(LaunchError, match=r"not ready within 0\.05 s; try --shadow none"):
        next(steps)
    cluster.nothing_left()
    release.set()
    cluster.main.launch_s = WAIT_S
    assert len(cluster.answer(expected.prompt[:20], 2, ignore_eos=True)[0]) == 2


def test_the_shadow_joins_after_the_first_token(cluster_of: Any, nf4: ShadowModel, expected: Any) -> None:
    cluster: TappedCluster
    start = ShadowStart(lambda: cluster.join_shadow(nf4) and None)
    cluster = cluster_of(shadow=start)
    steps: Iterator[Step] = cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    assert next(steps).token_id == expected.tokens[0]
    rest, report = collect(steps)
    assert rest == expected.tokens[1:]
    assert report.recall is not None
    assert len(report.recall_by_token) == TOKENS - 1
    assert None not in report.recall_by_token


def test_the_shadow_is_started_once() -> None:
    begun: list[int] = []
    start, barrier = ShadowStart(lambda: begun.append(1)), threading.Barrier(8)

    def begin() -> None:
        barrier.wait(WAIT_S)
        start.wait(WAIT_S)

    threads = [threading.Thread(target=begin, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert begun == [1]
