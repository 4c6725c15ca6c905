"""An answer of a server with the OpenAI API, as a stream of chunks."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from odmoe.api.completion import Alternative, Chunk, Ending, Logprob, Stream
from odmoe.api.over_http.errors import explained, refused, told_error
from scheduler.errors import DeadlineError, LinkError, ProtocolError, RequestCancelledError

Event = TypeVar("Event")
_LAST = "[DONE]"
_LARGEST = 64 << 20
"""Bytes of one event."""


class HttpStream(Stream):
    """See Stream. The request is sent when the first chunk is asked for."""

    def __init__(self, client: httpx2.Client, url: str, path: str, body: bytes, top: int) -> None:
        """`top`: how many of the most probable tokens of a completion are asked for."""
        super().__init__()
        self._wire = _Wire()
        self._facts = _Facts(top)
        self._events = _read(client, url, path, body, self._wire, self._facts)

    def _next(self) -> Chunk:
        return next(self._events)

    def _ending(self) -> Ending | None:
        facts = self._facts
        if not facts.ended or facts.finish is None:
            return None
        tokens = facts.usage.get("completion_tokens", len(self._chunks))
        return Ending(facts.finish, facts.usage.get("prompt_tokens", 0), tokens)

    def _cancel(self) -> None:
        self._wire.cut()

    def _close(self) -> None:
        self._events.close()


class _Facts:
    """What an answer's events say of the whole."""

    def __init__(self, top: int) -> None:
        """`top`: how many of the most probable tokens a completion was asked for."""
        self.top = top
        self.finish: str | None = None
        self.usage: dict[str, int] = {}
        self.ended = False


class _Wire:
    """The connection of one answer, which any thread may cut off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: Any = None
        self.cut_off = False

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """httpcore's `trace` extension: called at each step of the request. Raises RequestCancelledError where it was
        cut off before there was a socket."""
        with self._lock:
            if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
                self._socket = info["return_value"].get_extra_info("socket")
            if self.cut_off and event.endswith((".connect_tcp.started", ".send_request_headers.started")):
                raise RequestCancelledError("the answer was given up")

    def cut(self) -> None:
        """A thread that reads from the socket wakes up: closing it would not do that."""
        with self._lock:
            self.cut_off = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of a TLS socket too: no farewell


class _Watch:
    """Cuts a connection on which no event comes in time. Comments, which servers send in between, are no events, but
    httpx2's own timeout begins anew with each. What the caller takes to read an event does not count."""

    def __init__(self, url: str, timeout_s: float | None, wire: _Wire) -> None:
        self._url, self._wire = url, wire
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._changed = threading.Condition()
        self._until: float | None = time.monotonic() + self._timeout_s
        """None: no event is waited for."""
        self._ended = self._late = False
        self._thread = threading.Thread(target=self._run, name="odmoe-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises DeadlineError in place of what the cut has led to."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._late and kind is not GeneratorExit:
            raise DeadlineError(
                f"{self._url} sent no token for {self._timeout_s:g} s; look at the server's log, or give odmoe.connect "
                "a longer timeout"
            ) from error

    def each(self, events: Iterable[Event]) -> Generator[Event]:
        """The events. Each is waited for as long as the first."""
        coming = iter(events)
        while True:
            self._wait_until(time.monotonic() + self._timeout_s)
            found = next(coming, None)
            self._wait_until(None)
            if found is None:
                return
            yield found

    def _wait_until(self, until: float | None) -> None:
        with self._changed:
            self._until = until
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._ended:
                left = None if self._until is None else self._until - time.monotonic()
                if left is not None and left <= 0:
                    self._late = True
                    break
                self._changed.wait(left if left is None or left < threading.TIMEOUT_MAX else None)
        if self._late:
            self._wire.cut()


def _read(client: httpx2.Client, url: str, path: str, body: bytes, wire: _Wire, facts: _Facts) -> Generator[Chunk]:
    request = client.build_request(
        "POST", path, content=body, headers={"Content-Type": "application/json"}, extensions={"trace": wire.trace}
    )
    count = 0
    with explained(url), _Watch(url, client.timeout.read, wire) as watch:
        answer = client.send(request, stream=True)
        try:
            if answer.status_code != 200:
                answer.read()
                raise refused(url, answer)
            for event in watch.each(httpx2.EventSource(answer, max_event_size=_LARGEST)):
                if event.data == _LAST:
                    facts.ended = True
                    break
                for chunk in _chunks(_parsed(url, event.data), facts):
                    count += 1
                    yield chunk
        finally:
            answer.close()
    if not facts.ended or facts.finish is None:
        raise LinkError(f"{url} ended the answer after {count} chunks, before its end; ask again")


def _parsed(url: str, data: str) -> dict[str, Any]:
    """Raises ProtocolError, and the error that the event tells."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"{url} sent an event that is not JSON; check that it has the OpenAI API") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"{url} sent an event that is not an object; check that it has the OpenAI API")
    if isinstance(found.get("error"), dict):
        raise told_error(found["error"], 500)
    return found


def _chunks(event: dict[str, Any], facts: _Facts) -> Generator[Chunk]:
    """The chunks of an event, and what it says of the whole."""
    try:
        facts.usage.update(event.get("usage") or {})
        for choice in event.get("choices") or ():
            facts.finish = choice.get("finish_reason") or facts.finish
            chat = "delta" in choice
            text = choice["delta"].get("content") if chat else choice.get("text")
            logprobs = _of_chat(choice) if chat else _of_completion(choice, facts.top)
            if not isinstance(text, (str, type(None))):
                raise TypeError(f"text is {text!r}")
            if text or logprobs:
                yield from _by_token(text or "", logprobs)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ProtocolError(f"an event of the answer is not one of the OpenAI API ({error!r}): {event}") from error


def _by_token(text: str, logprobs: list[Logprob]) -> Generator[Chunk]:
    """One chunk, or one a token where there are log-probabilities. The last one has the text."""
    yield from (Chunk("", one.token_id, one) for one in logprobs[:-1])
    last = logprobs[-1] if logprobs else None
    yield Chunk(text, last.token_id if last else None, last)


def _of_chat(choice: dict[str, Any]) -> list[Logprob]:
    found = (choice.get("logprobs") or {}).get("content") or []
    return [
        Logprob(
            one["token"],
            one["logprob"],
            top=tuple(Alternative(each["token"], each["logprob"]) for each in one.get("top_logprobs") or ()),
        )
        for one in found
    ]


def _of_completion(choice: dict[str, Any], top_of: int) -> list[Logprob]:
    """The API adds the token itself to the `top_of` most probable ones where it is none of them."""
    found = choice.get("logprobs") or {}
    tokens, logprobs = found.get("tokens") or [], found.get("token_logprobs") or []
    tops = found.get("top_logprobs") or [{}] * len(tokens)
    return [
        Logprob(token, logprob, top=tuple(Alternative(*one) for one in _sorted(top or {})[:top_of]))
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]


def _sorted(top: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(top.items(), key=lambda one: -one[1])
