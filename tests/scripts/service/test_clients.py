"""What the load test counts: right answers, wrong ones, and every way to get none."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts.service.clients import Crowd, Question, Seen, arriving, at_once, lone_answers
from scripts.service.load import figures, percentile
from scripts.service.server import slope

LIMIT_S = 60.0
ANSWER = 'data: {"choices": [{"text": "%s", "finish_reason": null}]}\n\n'
END = 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
REPLIES: dict[str, tuple[int, str]] = {
    "right": (200, ANSWER % "to" + ANSWER % " be" + END),
    "wrong": (200, ANSWER % "or" + END),
    "cut": (200, ANSWER % "to"),
    "error": (200, ANSWER % "to" + 'data: {"error": {"message": "gone", "code": "main_node_lost"}}\n\n'),
    "full": (429, '{"error": {"message": "full", "code": "queue_full"}}'),
    "stopping": (503, '{"error": {"message": "stopping", "code": "stopping"}}'),
}


class Replies(BaseHTTPRequestHandler):
    """Answers by the request's prompt; `silent` never."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        name = next((name for name in REPLIES if f'"{name}"' in body), None)
        if name is None:
            self.connection.recv(1)  # until the client goes
            return
        status, text = REPLIES[name]
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Replies) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(LIMIT_S)


def asked(url: str, prompt: str, deadline_s: float = LIMIT_S) -> Seen:
    async def ask() -> Seen:
        async with Crowd(url, "demo-moe", deadline_s) as crowd:
            return await crowd.ask(Question(prompt, 2))

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("right", "whole"),
        ("wrong", "wrong"),
        ("cut", "cut: no end"),
        ("error", "error event: main_node_lost"),
        ("full", "429"),
        ("stopping", "refused 503"),
    ],
)
def test_what_a_client_sees(url: str, prompt: str, kind: str) -> None:
    assert asked(url, prompt).kind("to be") == kind


def test_silence_is_a_stuck_answer(url: str) -> None:
    assert asked(url, "silent", 0.2).kind("to be") == "stuck"


def test_nobody_listens() -> None:
    assert asked("http://127.0.0.1:1", "right").kind("to be") == "cut: ConnectError"


def test_clients_that_come_by_a_rate_and_in_a_closed_loop(url: str) -> None:
    async def ask() -> tuple[list[Seen], list[Seen], int]:
        question = Question("right", 2)
        async with Crowd(url, "demo-moe", LIMIT_S) as crowd:
            assert await lone_answers(crowd, [question]) == {question: "to be"}
            came = await arriving(crowd, [question], 50.0, 0.2, random.Random(0))
            looped = await at_once(3, lambda number: crowd.ask(question), 7)
            return came, looped, crowd.open

    came, looped, left = asyncio.run(ask())
    draw = random.Random(0)
    due, times = 0.0, 0
    while (due := due + draw.expovariate(50.0)) <= 0.2:
        times += 1
        draw.choice([0])
    assert (len(came), len(looped), left) == (times, 7, 0)
    assert {one.kind("to be") for one in came + looped} == {"whole"}


def test_the_figures_of_a_row() -> None:
    question = Question("p", 3)
    whole = Seen(question, due=1.0, times=[2.0, 2.5, 3.5], text="x", status=200, done=True)
    others = [
        Seen(question, 0.0, text="y", status=200, done=True),
        Seen(question, 0.0, status=429, error="queue_full"),
        Seen(question, 0.0, error="stuck"),
        Seen(question, 0.0, status=200, error="ReadError"),
    ]
    row = figures([whole, *others], {question: "x"}, 2.0)
    assert (row["requests"], row["whole"], row["wrong"], row["stuck"], row["refused_429"]) == (5, 1, 1, 1, 1)
    assert row["others"] == {"cut: ReadError": 1}
    assert (row["tokens_per_s"], row["ttft_p50_s"], row["gap_p99_s"], row["longest_gap_s"]) == (1.5, 1.0, 1.0, 1.0)


def test_percentiles_and_slopes() -> None:
    values = [float(n) for n in range(100)]
    assert [percentile(values, share) for share in (50, 95, 99)] == [50.0, 95.0, 99.0]
    assert percentile([], 50) is None
    points = [(0.0, 10), (1.0, 13), (2.0, 12), (5.0, 30)]
    assert slope(points) == pytest.approx(statistics.linear_regression(*zip(*points, strict=True)).slope)
    assert slope(points[:1]) == 0.0
