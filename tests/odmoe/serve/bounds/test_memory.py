"""What all requests together may hold, and who gives way."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from main_node.answer import Step
from main_node.logprobs import TokenLogprobs
from odmoe.api.text_answer import Piece, TextAnswer
from odmoe.serve.api_error import ApiError
from odmoe.serve.bounds.memory import Held, Memory
from odmoe.serve.sse import MANY, encode, encoded_parts
from support.machines.http_service import WAIT_S, Served, is_idle, request_bytes, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model

ASK: dict[str, Any] = {"model": "demo-moe", "prompt": "Natalia", "max_tokens": 2}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=60))
def test_the_largest_gives_way(steps: list[tuple[int, int]]) -> None:
    memory, errors = Memory(100), dict[int, ApiError]()
    held = {number: memory.open(lambda error, number=number: errors.update({number: error})) for number in range(5)}  # type: ignore[misc]
    sizes = dict.fromkeys(range(5), 0)
    for number, size in steps:
        if number in errors:
            continue
        sizes[number] += size
        most = max(sizes.values())
        is_over = sum(sizes.values()) > 100
        held[number].add(size)
        assert memory.total <= 100
        given_way = [one for one in errors if sizes.pop(one, None) is not None]
        assert bool(given_way) == is_over
        assert not sizes or max(sizes.values()) <= most
    for one in held.values():
        one.close()
        one.add(5)
    assert memory.total == 0
    assert {(error.status, error.code) for error in errors.values()} <= {(429, "memory_full")}


def unfinished(served: Served, size: int) -> bytes:
    whole = request_bytes(served, ASK | {"prompt": "x" * size})
    return whole[:-1]


@pytest.mark.slow
def test_bodies_that_are_held_back(model: Model) -> None:
    """Each is allowed, all of them are not: they push out one another, and none that is small."""
    most = 4 << 20
    with serving(model) as served, ExitStack() as stack:
        served.service.memory.most = most
        clients = []
        for _ in range(12):
            client = stack.enter_context(socket.create_connection(served.address, WAIT_S))
            client.sendall(unfinished(served, 1 << 20))
            clients.append(client)
            assert served.client().completions.create(**ASK).choices
        until(lambda: served.service.memory.total > most // 2)
        assert served.service.memory.total <= most
        refused = served.counted("odmoe_refused_requests_total", reason="memory_full")
        assert 8 <= refused <= 10
        told = [client.recv(1 << 16) for client in select.select(clients, [], [], WAIT_S)[0]]
        assert len(told) == refused
        assert all(one.startswith(b"HTTP/1.1 429 ") and b'"memory_full"' in one for one in told)
        for client in clients:
            client.close()
        until(lambda: is_idle(served) and served.service.memory.total == 0)


def test_a_body_that_says_it_is_too_large_is_not_read(served: Served) -> None:
    size = served.service.limits.body_bytes + 1
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {served.host}\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall(head.encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has 400 tokens with 20 log-probabilities each."""

    def read(self: Any, *given: Any) -> Iterator[Piece]:
        top = tuple((number, -1.0) for number in range(20))
        for number in range(400):
            yield Piece("x", Step(5, None, "length" if number == 399 else None, TokenLogprobs(5, -1.0, top)))

    monkeypatch.setattr(TextAnswer, "_read", read)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_results_that_wait(model: Model) -> None:
    ask = ASK | {"logprobs": 20}
    with serving(model) as served:
        served.service.memory.most = 3 << 20
        whole = served.client().completions.create(**ask)
        assert len(whole.choices[0].logprobs.tokens) == 400  # type: ignore[union-attr]
        with pytest.raises(openai.RateLimitError) as found:
            served.client().completions.create(**ask, n=8)
        assert found.value.code == "memory_full"
        stream = served.client().completions.create(**ask, n=8, stream=True)
        assert sum(len(event.choices) for event in stream) > 0  # a client that reads has what it asked for
        until(lambda: is_idle(served) and served.service.memory.total == 0)


@settings(max_examples=25)
@given(
    st.recursive(
        st.none() | st.text() | st.integers() | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(), inner)
            | st.lists(inner, min_size=1, max_size=2).map(lambda one: one * MANY)
        ),
        max_leaves=8,
    )
)
def test_parts_are_the_whole(value: Any) -> None:
    parts = list(encoded_parts(value))
    assert b"".join(parts) == encode(value)
    assert json.loads(b"".join(parts).decode("utf-8", "surrogatepass")) == value


def test_flags(model: Model) -> None:
    with serving(model, body_size="1kB", request_memory="1MiB") as served:
        assert served.service.limits.body_bytes == 1000
        assert served.service.memory.most == 1 << 20
        with pytest.raises(openai.APIStatusError, match="--body-size"):
            served.client().completions.create(**(ASK | {"prompt": "a" * 2000}))


def test_it_ends_with_its_request(model: Model) -> None:
    with serving(model) as served:
        opened: list[Held] = []
        whole = served.service.memory.open
        served.service.memory.open = lambda give_up: opened.append(whole(give_up)) or opened[-1]  # type: ignore[assignment,func-returns-value,method-assign]
        served.service.limits = replace(served.service.limits)
        assert served.client().completions.create(**ASK).choices
        until(lambda: is_idle(served))
        assert [one.nbytes for one in opened] == [0]
