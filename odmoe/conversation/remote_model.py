"""A model behind a service that speaks OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from odmoe.conversation.chat_model import Delta, Figures, Message
from odmoe.conversation.transcript import plain_text
from scheduler.errors import ConfigError, LinkError, RequestCancelledError, RequestError

if TYPE_CHECKING:
    import httpx2

CONNECT_S = 10.0
SILENCE_S = 600.0
"""Longest time without a byte of an answer. Our own service sends a comment every 15 s."""
MOST_LINE = 1 << 24
"""Bytes of one event."""


class RemoteModel:
    """Models of `GET /v1/models`, asked by `POST /v1/chat/completions`."""

    def __init__(
        self,
        url: str,
        key: str | None,
        model: str,
        options: Mapping[str, Any],
        use_template: bool,
        through: Path | None = None,
    ) -> None:
        """`model`: its name there; empty: the first that is listed. `options`: fields of each request, such as
        `temperature`. Without `use_template` the conversation is continued as plain text, by `/v1/completions`.
        `through`: a Unix socket that leads to the service.

        Raises ConfigError, LinkError, RequestError.
        """
        import httpx2

        self.url, self._options, self._use_template = _checked_url(url), dict(options), use_template
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
            verify=self.url.startswith("https:"),  # else reading all certificates takes a tenth of a second
            transport=None if through is None else httpx2.HTTPTransport(uds=str(through), verify=False),
        )
        try:
            self._name = model or self._first()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    def names(self) -> list[str]:
        with _explained(self.url):
            response = self._client.get(f"{self.url}/models", timeout=CONNECT_S)
            found = _answered(response, self.url)
        try:
            return [str(one["id"]) for one in found["data"]]
        except (KeyError, TypeError) as error:
            raise RequestError(f"{self.url}/models is no list of models; check that --url ends with /v1") from error

    def choose(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise ConfigError(f"{self.url} has no model {name!r}; it has {', '.join(names) or 'none'}")
        self._name = name

    def answer(self, messages: Sequence[Message]) -> _RemoteAnswer:
        body = {"model": self._name, "stream": True, "stream_options": {"include_usage": True}, **self._options}
        given = [dict(one) for one in messages]
        if self._use_template:
            return _RemoteAnswer(self._client, f"{self.url}/chat/completions", {**body, "messages": given})
        return _RemoteAnswer(self._client, f"{self.url}/completions", {**body, "prompt": plain_text(given)})

    def close(self) -> None:
        self._client.close()

    def _first(self) -> str:
        names = self.names()
        if not names:
            raise ConfigError(f"{self.url} lists no model; give its name with --model")
        return names[0]


class _RemoteAnswer:
    def __init__(self, client: httpx2.Client, url: str, body: dict[str, Any]) -> None:
        self._client, self._url, self._body = client, url, body
        self._response: httpx2.Response | None = None
        self._is_cancelled = False
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None

    def __iter__(self) -> Iterator[Delta]:
        self._began = time.monotonic()
        try:
            with _explained(self._url), self._client.stream("POST", self._url, json=self._body) as response:
                self._response = response
                if response.status_code != 200:
                    response.read()
                    _answered(response, self._url)
                yield from self._deltas(response)
        except (LinkError, RequestError) as error:
            if self._is_cancelled:
                raise RequestCancelledError("the answer was given up") from error
            raise

    def cancel(self) -> None:
        self._is_cancelled = True
        stream = self._response.extensions.get("network_stream") if self._response else None
        connection = stream.get_extra_info("socket") if stream else None
        if connection is not None:
            with contextlib.suppress(OSError):  # wakes the thread that reads, and tells the service
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def figures(self) -> Figures:
        count = self._usage.get("completion_tokens")
        details = self._usage.get("prompt_tokens_details") or {}
        spent = self._last - self._first if self._first is not None else 0.0
        return Figures(
            self._usage.get("prompt_tokens"),
            details.get("cached_tokens"),
            count,
            None if self._first is None else self._first - self._began,
            (count - 1) / spent if count and count > 1 and spent > 0 else None,
            self._finish,
        )

    def _deltas(self, response: httpx2.Response) -> Iterator[Delta]:
        for data in _events(response):
            if data == "[DONE]":
                return
            try:
                event = json.loads(data)
                error = event.get("error")
                choice = (event.get("choices") or [{}])[0]
            except (ValueError, AttributeError, LookupError, RecursionError) as wrong:
                raise RequestError(f"{self._url} sent an event that is no object of JSON: {data[:80]!r}") from wrong
            if error:
                raise RequestError(f"{self._url}: {_text_of(error)}")
            self._usage = event.get("usage") or self._usage
            self._finish = choice.get("finish_reason") or self._finish
            found = choice.get("delta") or {}
            text = found.get("content") or choice.get("text") or ""
            reasoning = found.get("reasoning_content") or found.get("reasoning") or ""
            if text or reasoning:
                self._last = time.monotonic()
                self._first = self._last if self._first is None else self._first
                yield Delta(text, reasoning)


def _events(response: httpx2.Response) -> Iterator[str]:
    """The data of server-sent events. Lines end at a line feed alone: text may hold other separators of lines."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MOST_LINE:
            raise RequestError(f"an event of {response.url} has more than {MOST_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")


def _answered(response: httpx2.Response, url: str) -> Any:
    """The JSON of a response. Raises RequestError, or ConfigError if key, model or template are at fault."""
    try:
        found = response.json()
    except (ValueError, RecursionError):
        found = None
    if response.status_code == 200 and found is not None:
        return found
    error = found.get("error") if isinstance(found, dict) else None
    reason = _text_of(error) if error else response.reason_phrase or "no JSON"
    code = error.get("code") if isinstance(error, dict) else None
    if code == "no_chat_template":
        raise ConfigError(f"{url}: {reason}; odmoe chat --no-template continues plain text")
    if response.status_code == 401:
        raise ConfigError(f"{url} refuses the key ({reason}); give it in ODMOE_API_KEY or with --api-key")
    if response.status_code == 404:
        raise ConfigError(f"{url}: {reason}; check --url, which ends with /v1, and --model")
    raise RequestError(f"{url} answers {response.status_code}: {reason}")


def _text_of(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _checked_url(url: str) -> str:
    """Without a path, `/v1` is meant."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url is {url!r}; allowed: the address of a service, such as http://127.0.0.1:8000/v1")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Errors of the connection, by name."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException as error:
        raise LinkError(f"{url} did not answer in time ({type(error).__name__}); check that it runs") from error
    except httpx2.ConnectError as error:
        raise LinkError(f"{url} cannot be reached ({error}); start a service with odmoe serve") from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise LinkError(f"the connection to {url} broke ({error or type(error).__name__}); ask again") from error
