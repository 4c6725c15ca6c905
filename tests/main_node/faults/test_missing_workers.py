"""Open requests while every worker is gone: they wait, go on with the same tokens, or fail by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from main_node.answer import collect
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.errors import RequestFailedError
from shadow_node.model import ShadowModel
from support.nodes.engine_world import Desk, Later, close, good, once, rows_of
from support.nodes.served_cluster import ServedCluster
from wire import messages as w

pytestmark = pytest.mark.timeout(90)
TOKENS = 6


@pytest.fixture
def served_of(demo_store: Callable[[str], Any]) -> Iterator[Callable[..., ServedCluster]]:
    made: list[ServedCluster] = []

    def build(**settings: Any) -> ServedCluster:
        made.append(ServedCluster(demo_store("float32"), **settings))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("shadowed", [False, True])
def test_every_stream_is_cut_in_the_middle_of_an_answer(
    shadowed: bool, served_of: Callable[..., ServedCluster], nf4: ShadowModel, reference: Any
) -> None:
    """As after a main node was frozen: all nodes have given it up, none has died."""
    cluster, expected = served_of(shadow=nf4 if shadowed else None), reference("float32", 0, TOKENS)
    tokens = []
    for step in (answer := cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True)):
        tokens.append(step.token_id)
        if len(tokens) in (2, 4):
            cluster.cut_streams()
        if len(tokens) == TOKENS:
            break
    _, report = collect(answer)
    assert tokens == expected.tokens
    nodes = {"worker 0", "worker 1", "worker 2", *(["shadow"] if shadowed else [])}
    assert set(report.cluster.lost) == nodes
    assert set(report.cluster.rejoined) >= nodes - {"shadow"}
    assert cluster.engine.idle()


@pytest.mark.slow
def test_several_requests_wait_together(served_of: Callable[..., ServedCluster], reference: Any) -> None:
    cluster = served_of()
    wanted = [reference("float32", number, TOKENS) for number in range(2)]
    answers = [cluster.main.generate(one.prompt, TOKENS, ignore_eos=True) for one in wanted]
    firsts = [next(answer).token_id for answer in answers]
    got = [Later(lambda answer=answer: collect(answer)) for answer in answers]
    time.sleep(0.2)
    cluster.cut_streams()
    rests = [one.result(60.0)[0] for one in got]
    assert [[first, *rest] for first, rest in zip(firsts, rests, strict=True)] == [one.tokens for one in wanted]


@pytest.mark.slow
def test_nobody_comes_back(served_of: Callable[..., ServedCluster], reference: Any) -> None:
    cluster, expected = served_of(worker_wait_s=1.0), reference("float32", 0, TOKENS)
    with cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True) as answer:
        next(answer)
        for server in cluster.servers:
            server.close(0.0)
        with pytest.raises(
            RequestFailedError,
            match=r"the last worker is gone: .*; worker 0, worker 1, worker 2 did not come back within 1 s: start them "
            "again, or wait longer with --worker-wait",
        ):
            collect(answer)
    assert cluster.engine.idle()


def test_a_request_that_comes_while_workers_are_missing_waits_too(desk_of: Any) -> None:
    desk: Desk = desk_of(worker_wait_s=30.0)
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    time.sleep(0.2)
    desk.join(0, desk.fake(good))
    assert waiting.result().equal(rows_of(1).expected(0))


def test_a_layer_waits_longer_than_an_answer_may_take(desk_of: Any) -> None:
    """No worker owes it anything meanwhile, and that is no defect."""
    desk: Desk = desk_of(answer_s=0.1, worker_wait_s=30.0)
    desk.workers(once(w.Load, close))
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    time.sleep(0.5)
    assert desk.engine.deadlines.waited_s > 0.1
    desk.join(0, desk.fake(good))
    assert waiting.result().equal(rows_of(1).expected(0))


def test_no_worker_at_all_is_named(desk_of: Any) -> None:
    desk: Desk = desk_of(worker_wait_s=0.3)
    desk.open()
    with pytest.raises(
        RequestFailedError, match=r"no worker is connected; a worker did not come back within 0\.3 s: start it again"
    ):
        Later(lambda: desk.layer(rows_of(1))).result()


def test_a_main_node_that_is_closed_does_not_wait(desk_of: Any) -> None:
    desk: Desk = desk_of(worker_wait_s=3600.0)
    desk.workers(once(w.Load, close))
    desk.open()
    waiting = Later(lambda: desk.layer(rows_of(1)))
    time.sleep(0.2)
    desk.engine.close()
    with pytest.raises(RequestFailedError, match="the last worker is gone"):
        waiting.result()


def test_a_lost_worker_of_this_process_comes_back(demo_store: Callable[[str], Any], reference: Any) -> None:
    expected = reference("float32", 0, TOKENS)
    settings = Settings(model="demo", shadow="none", workers=2, threads=1, loader="memory")
    cluster = EmbeddedCluster(settings, demo_store("float32"))
    try:
        answer = cluster.generate(expected.prompt, TOKENS, ignore_eos=True)
        first = next(answer).token_id
        for peer in cluster.main.engine.peers.all():
            peer.on_close(None)
        rest, report = collect(answer)
        assert [first, *rest] == expected.tokens
        assert report.cluster.lost == ["worker 0", "worker 1"]
        assert {"worker 0", "worker 1"} >= set(report.cluster.rejoined) != set()
    finally:
        cluster.close()
