"""Several answers at once, in turns; and answers that are given up from another thread, in the middle of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from main_node.answer import collect
from main_node.request import Request
from main_node.shadow_start import ShadowStart
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError, ODMoEError, RequestCancelledError
from support.nodes.engine_world import nothing_left
from support.nodes.tapped_cluster import TappedCluster
from wire import inprocess
from wire import messages as w
from wire.base import Channel
from worker_node.loaders.memory import MemoryLoader

WAIT_S = 60.0
COUNT = 20


@pytest.fixture
def cluster(demo_store: Callable[[str], Any]) -> Iterator[EmbeddedCluster]:
    # an audit may outlast its answer, and these tests look at what an answer leaves behind
    settings = Settings(model="demo", shadow="none", workers=2, threads=1, loader="memory", audit=0)
    made = EmbeddedCluster(settings, demo_store("float32"))
    yield made
    made.close()


def together(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.slow
def test_threads_get_their_tokens_in_turns(cluster: EmbeddedCluster, reference: Any) -> None:
    """Four at once: each answer as if it were alone, and nobody more than a few tokens ahead."""
    wanted = [reference("float32", number, COUNT) for number in range(4)]
    got: list[list[int]] = [[] for _ in wanted]
    order: list[int] = []

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(1)
            for step in cluster.generate(wanted[number].prompt, COUNT, ignore_eos=True):
                if step.token_id is not None:
                    got[number].append(step.token_id)
                    order.append(number)

        return run

    together([job(number) for number in range(4)])
    assert got == [one.tokens for one in wanted]
    begun = max(order.index(number) for number in range(4))
    shared = order[begun : begun + 4 * 10]  # all four under way, none done
    assert all(shared.count(number) >= 7 for number in range(4)), shared


class Stuck:
    """In the place of a loader's `load`: loads end only when they are given up."""

    def __init__(self) -> None:
        self.under_way = 0
        self.begun = threading.Event()
        self.changed = threading.Condition()

    def __call__(
        self, layer: int, expert: int, into: Any, cancelled: Callable[[], bool], form: str = "", digest: Any = None
    ) -> int:
        self._count(1)
        self.begun.set()
        waited = threading.Event()
        for _ in range(int(WAIT_S * 100)):
            if cancelled():
                self._count(-1)
                return 0
            waited.wait(0.01)
        raise OSError("nobody gave this load up")

    def _count(self, more: int) -> None:
        with self.changed:
            self.under_way += more
            self.changed.notify_all()


def test_cancelled_in_the_middle_of_a_load(
    cluster: EmbeddedCluster, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loads end at once, whoever waits hears of it, and the next request is served."""
    expected = reference("float32", 0, COUNT)
    stuck = Stuck()
    answer = cluster.generate(expected.prompt, COUNT, ignore_eos=True)
    assert next(answer).token_id == expected.tokens[0]
    monkeypatch.setattr(MemoryLoader, "load", lambda loader, *asked: stuck(*asked))
    heard: list[BaseException] = []

    def run() -> None:
        try:
            next(answer)
        except RequestCancelledError as error:
            heard.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert stuck.begun.wait(WAIT_S)
    answer.cancel()
    thread.join(WAIT_S)
    assert [str(error) for error in heard] == [f"request {answer.number} was cancelled"]
    with stuck.changed:
        assert stuck.changed.wait_for(lambda: not stuck.under_way, WAIT_S)
    monkeypatch.undo()
    with pytest.raises(RequestCancelledError):
        next(answer)
    assert nothing_left(cluster.main.engine)
    assert collect(cluster.generate(expected.prompt, 4, ignore_eos=True))[0] == expected.tokens[:4]


def test_cancelled_before_its_first_token(cluster: EmbeddedCluster) -> None:
    answer = cluster.generate([5, 6, 7], 4)
    answer.cancel()
    with pytest.raises(RequestCancelledError):
        next(answer)
    assert len(collect(cluster.generate([5, 6, 7], 4, ignore_eos=True))[0]) == 4


class SilentShadow:
    """Follows every request, and predicts nothing."""

    def accept(self, reply: Channel) -> SilentShadow:
        self.reply = reply
        return self

    def on_message(self, message: w.Message) -> None:
        if isinstance(message, w.Hello):
            self.reply.send(w.ShadowReady(w.PROTOCOL_VERSION, "shadow", "none", 0, "box", 1, "a processor", "cpu"))
        elif isinstance(message, w.Echo):
            self.reply.send(message)
        elif isinstance(message, w.AskUsage):
            self.reply.send(w.ShadowUsage(0))

    def on_close(self, error: ODMoEError | None) -> None:
        pass

    def close(self) -> None:
        pass


def test_cancelled_while_its_last_predictions_are_waited_for(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cluster.main.engine
    engine.peers.add_shadow(lambda handler: inprocess.connect(SilentShadow(), handler), WAIT_S)
    wait, waiting = engine.wait_for_predictions, threading.Event()

    def told(number: int, deadline_s: float) -> bool:
        waiting.set()
        return wait(number, deadline_s)

    monkeypatch.setattr(engine, "wait_for_predictions", told)
    monkeypatch.setattr("main_node.node.LAST_PREDICTIONS_S", 3600.0)
    answer = cluster.generate([5, 6, 7], 2, ignore_eos=True)
    next(answer)
    next(answer)
    canceller = threading.Thread(target=lambda: waiting.wait(WAIT_S) and answer.cancel())
    canceller.start()
    with pytest.raises(RequestCancelledError):
        next(answer)
    canceller.join(WAIT_S)


def test_the_last_token_does_not_wait_for_a_silent_shadow(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the place of the next request. Only the report waits for predictions."""
    cluster.main.engine.peers.add_shadow(lambda handler: inprocess.connect(SilentShadow(), handler), WAIT_S)
    monkeypatch.setattr("main_node.node.LAST_PREDICTIONS_S", 3600.0)
    with cluster.generate([5, 6, 7], 3, ignore_eos=True) as answer:
        assert [next(answer).finish for _ in range(3)] == [None, None, "length"]
        assert cluster.main.admission.counts() == (0, 0)
        assert cluster.main.steps.idle()
        assert answer.request.sequence.cache is None
    assert nothing_left(cluster.main.engine)


def test_predictions_that_never_came_are_told_apart_from_wrong_ones(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.main.engine.peers.add_shadow(lambda handler: inprocess.connect(SilentShadow(), handler), WAIT_S)
    monkeypatch.setattr("main_node.node.LAST_PREDICTIONS_S", 0.05)
    *_, last = cluster.generate([5, 6, 7], 3, ignore_eos=True)
    shape = cluster.main.shape
    assert last.report is not None
    assert (last.report.recall, last.report.recall_by_token, last.report.recall_in_time) == (None, [None, None], 0.0)
    assert last.report.unpredicted == 2 * len(shape.layers) * shape.top_k
    assert not last.report.recall_complete


def test_a_silent_shadow_is_lost(
    cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cluster.main.engine
    monkeypatch.setattr(engine.peers, "on_lost", lambda kind, number: None)  # it is not brought back
    engine.deadlines.shadow_s = 0.3
    engine.peers.add_shadow(lambda handler: inprocess.connect(SilentShadow(), handler), WAIT_S)
    _, report = collect(cluster.generate([5, 6, 7], 3, ignore_eos=True))
    assert (report.cluster.lost, engine.peers.shadow) == (["shadow"], None)
    assert not report.recall_complete
    assert "it owes the predictions of 16 layers and has sent none for 0." in caplog.text
    _, after = collect(cluster.generate([5, 6, 7], 3, ignore_eos=True))
    assert after.recall_complete  # no shadow owes any
    engine.peers.add_shadow(lambda handler: inprocess.connect(SilentShadow(), handler), WAIT_S)
    monkeypatch.setattr("main_node.node.LAST_PREDICTIONS_S", 3600.0)
    engine.deadlines.shadow_s = 3600.0
    _, back = collect(cluster.generate([5, 6, 7], 3, ignore_eos=True))  # it is not waited for until it sends one
    assert not back.recall_complete


def test_cancelled_while_the_shadow_is_made(cluster_of: Callable[..., TappedCluster]) -> None:
    release = threading.Event()
    made = cluster_of(shadow=ShadowStart(lambda: release.wait(WAIT_S) and None))
    answer = made.main.generate([5, 6, 7], 4, ignore_eos=True)
    next(answer)
    timer = threading.Timer(0.1, answer.cancel)
    timer.start()
    with pytest.raises(RequestCancelledError):
        next(answer)
    assert not release.is_set()
    release.set()
    timer.join(WAIT_S)


def test_cancelled_just_before_the_engine_hears_of_it(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = cluster.generate([5, 6, 7], 4, ignore_eos=True)
    opened = cluster.main.engine.open_request

    def late(request: Request) -> None:
        answer.cancel()
        opened(request)

    monkeypatch.setattr(cluster.main.engine, "open_request", late)
    with pytest.raises(RequestCancelledError):
        next(answer)
    assert cluster.main.engine.core.stats == {}  # not even its prompt was begun


def test_closed_twice_and_after_the_end(cluster: EmbeddedCluster) -> None:
    answer = cluster.generate([5, 6, 7], 2, ignore_eos=True)
    assert len(collect(answer)[0]) == 2
    answer.close()
    answer.close()
    answer.cancel()


def test_a_smaller_context(demo_store: Callable[[str], Any]) -> None:
    settings = Settings(model="demo", shadow="none", workers=1, threads=1, ctx_size=12)
    cluster = EmbeddedCluster(settings, demo_store("float32"))
    try:
        *_, last = cluster.generate([5] * 8, 50, ignore_eos=True)
        assert last.report is not None
        assert (last.report.new_tokens, last.report.finish) == (4, "context")
    finally:
        cluster.close()
    with pytest.raises(ConfigError, match=r"ctx-size is 4096; allowed: 2 to 1024"):
        EmbeddedCluster(settings.replace(ctx_size=4096), demo_store("float32"))
