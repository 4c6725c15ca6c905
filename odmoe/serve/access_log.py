"""A line a request. Prompts and answers are never in it."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from odmoe.log_thread import utc_time
from scheduler.one_line import one_line

if TYPE_CHECKING:
    from main_node.report import Report

PREFIXES = ("/v1/", "/api/", "/tokenize", "/detokenize")
"""Paths whose requests are logged; a monitor asks the others all the time."""
OWN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a client may give as the id of its request."""
MOST_CHARACTERS = 512
"""Of what a client has written that is logged: its path, its model."""
GONE = 499
"""The status of a request whose client has gone before the answer began; nobody gets it. nginx writes the same."""


@dataclass(slots=True)
class Record:
    """What is known of one request. Times in seconds."""

    id: str
    method: str
    path: str
    client: str | None = None
    """Its address."""
    key: str | None = None
    """The name of its API key."""
    began: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    """When the last byte of the answer was sent. The line comes later, with the recall."""
    status: int = 0
    model: str | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    tokens: int | None = None
    ttft_s: float | None = None
    """To the first token of its first answer, the wait for a place included."""
    recall: float | None = None
    """Of its answers together, weighted by their tokens."""
    finish: str | None = None
    """Why its answers ended, or why there are none."""
    _finishes: set[str] = field(default_factory=set)
    _recalled: tuple[float, int] = (0.0, 0)
    """The sum of recall times tokens, and of tokens, of answers that have a recall."""

    def on_answered(self, finish: str, report: Report | None) -> None:
        """One of its answers has ended. `report`: None if it did not come."""
        if report is not None and report.recall is not None:
            total, tokens = self._recalled
            self._recalled = total + report.recall * report.new_tokens, tokens + report.new_tokens
            self.recall = self._recalled[0] / self._recalled[1]
        self._finishes.add(finish)
        self.finish = ",".join(sorted(self._finishes))

    def facts(self) -> dict[str, Any]:
        """In the order of a line. Without what is not known."""
        total = (self.ended or time.perf_counter()) - self.began
        found = {
            "time": utc_time(),
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "client": self.client,
            "key": self.key,
            "model": self.model,
            "stream": self.stream or None,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "ttft_s": _round(self.ttft_s),
            "total_s": _round(total),
            "recall": _round(self.recall),
            "finish": self.finish,
        }
        return {
            name: one_line(value, MOST_CHARACTERS) if isinstance(value, str) else value
            for name, value in found.items()
            if value is not None
        }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def as_text(facts: dict[str, Any]) -> str:
    """`2026-01-01T00:00:00Z cmpl-... POST /v1/completions 200 tokens=5 ...`"""
    head = ("time", "id", "method", "path", "status")
    rest = [f"{name}={value}" for name, value in facts.items() if name not in head]
    return " ".join([*(str(facts[name]) for name in head), *rest])


FORMATS: dict[str, Callable[[dict[str, Any]], str]] = {"text": as_text, "json": json.dumps}


def _request_id(scope: Scope) -> str:
    """The client's own, or a new one if it has none or one with other characters."""
    given = Headers(raw=scope.get("headers", [])).get("x-request-id", "")
    return given if OWN_ID.fullmatch(given) else secrets.token_hex(12)


class AccessLog:
    """Makes the record of a request, `scope["state"]["record"]`, and writes it when the request has ended. The answer
    says its id as `x-request-id`."""

    def __init__(self, app: ASGIApp, write: Callable[[str], None], line: Callable[[dict[str, Any]], str]) -> None:
        self._app, self._write, self._line = app, write, line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "backslashreplace")
        client = scope.get("client")
        record = Record(_request_id(scope), scope["method"], path, client[0] if client else None)
        scope.setdefault("state", {})["record"] = record

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.ended = time.perf_counter()

        try:
            await self._app(scope, receive, send_noted)
        except BaseException:
            record.status = record.status or 500
            raise
        finally:
            record.status = record.status or GONE
            if record.path.startswith(PREFIXES):
                self._write(self._line(record.facts()))
