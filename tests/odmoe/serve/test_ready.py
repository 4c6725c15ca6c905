"""Whether requests can be answered now, and what strangers are told of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from odmoe.serve import status
from scheduler.errors import CorruptStoreError, MainNodeLostError
from support.machines.http_service import WAIT_S, Served, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model


@pytest.fixture(autouse=True)
def _asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "FRESH_S", 0.0)


def ready(served: Served) -> tuple[int, Any]:
    found = httpx2.get(f"{served.url}/ready", timeout=WAIT_S)
    return found.status_code, found.json()


def test_ready(served: Served) -> None:
    assert ready(served) == (200, {"status": "ready"})


def test_a_lost_main_node(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise MainNodeLostError("the main node on host-of-a-secret-name is gone")

    monkeypatch.setattr(served.service.model.cluster, "figures", lost)
    why = "the main node is lost or does not answer"
    assert ready(served) == (503, {"status": "not ready", "why": why})
    assert httpx2.get(f"{served.url}/health").status_code == 200


def test_lost_workers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is enough."""
    figures = served.service.model.cluster.figures()
    workers = [node for node in figures.nodes if node.role == "worker"]
    assert len(workers) == 2

    def without(*lost: Any) -> Any:
        return replace(figures, nodes=tuple(replace(one, up=one.up and one not in lost) for one in figures.nodes))

    monkeypatch.setattr(served.service.model.cluster, "figures", lambda: without(workers[0]))
    assert ready(served)[0] == 200
    monkeypatch.setattr(served.service.model.cluster, "figures", lambda: without(*workers))
    assert ready(served) == (503, {"status": "not ready", "why": "every worker is lost"})


def test_answers_that_fail(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a damaged store. One that is wrong alone changes nothing."""
    from odmoe.api.text_answer import TextAnswer

    monkeypatch.setattr(status, "TRIAL_S", 0.0)
    whole, broken = TextAnswer._read, [True]

    def read(self: Any, tried: Any, tokenizer: Any, prompt: list[int], *more: Any) -> Any:
        if broken[0] or len(prompt) < 5:
            raise CorruptStoreError("/home/somebody/store: experts.bin is damaged")
        yield from whole(self, tried, tokenizer, prompt, *more)

    def ask() -> None:
        served.client().completions.create(model="demo-moe", prompt="a", max_tokens=1)

    monkeypatch.setattr(TextAnswer, "_read", read)
    assert ready(served)[0] == 200
    with pytest.raises(openai.InternalServerError):
        ask()
    why = "answers fail; the server's log has the cause"
    assert ready(served) == (503, {"status": "not ready", "why": why})
    assert ready(served)[0] == 503
    broken[0] = False
    until(lambda: ready(served)[0] == 200)
    with pytest.raises(openai.InternalServerError):
        ask()
    until(lambda: ready(served)[0] == 200)


@pytest.mark.slow
def test_however_many_ask_the_cluster_is_asked_once_and_requests_are_answered(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = [], threading.Event()
    figures = model.cluster.figures

    def slow() -> Any:
        asked.append(threading.current_thread())
        assert go.wait(WAIT_S)
        return figures()

    monkeypatch.setattr(status, "FRESH_S", 3600.0)
    monkeypatch.setattr(status, "READY_S", WAIT_S)
    with serving(model) as served, ThreadPoolExecutor(40) as pool:
        monkeypatch.setattr(model.cluster, "figures", slow)
        try:
            waiting = [pool.submit(ready, served) for _ in range(40)]
            until(lambda: bool(asked))
            assert served.client().completions.create(model="demo-moe", prompt="a", max_tokens=1).choices
        finally:
            go.set()
        assert {one.result(WAIT_S)[0] for one in waiting} == {200}
        assert len(asked) == 1
