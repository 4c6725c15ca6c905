"""A server that answers as it is asked to, in place of a service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

LIMIT_S = 60.0
TEXT = 'data: {"choices": [{"text": "%s", "finish_reason": null}]}\n\n'
FINISH = 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
END = FINISH + 'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
REPLIES: dict[str, tuple[int, str]] = {
    "right": (200, TEXT % "to" + TEXT % " be" + END),
    "wrong": (200, TEXT % "or" + END),
    "short": (200, TEXT % "to be" + END.replace("2", "1")),
    "cut": (200, TEXT % "to"),
    "error": (200, TEXT % "to" + 'data: {"error": {"message": "gone", "code": "main_node_lost"}}\n\n'),
    "full": (429, '{"error": {"message": "full", "code": "queue_full"}}'),
    "stopping": (503, '{"error": {"message": "stopping", "code": "stopping"}}'),
    "bare": (502, "<html>"),
}


class Replies(BaseHTTPRequestHandler):
    """Answers by the request's prompt. `silent`: never. `endless`: one token, and then nothing. Both note that their
    client has gone."""

    gone = threading.Semaphore(0)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        name = next((name for name in REPLIES if f'"{name}"' in body), None)
        if name is None and '"endless"' in body:
            self._reply(200, TEXT % "to")
        if name is not None:
            self._reply(*REPLIES[name])
            return
        self.connection.recv(1)  # until the client goes
        self.gone.release()

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Retry-After", "1")
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


@pytest.fixture
def gone() -> threading.Semaphore:
    """Counts the clients that have left an answer that does not end."""
    return Replies.gone
