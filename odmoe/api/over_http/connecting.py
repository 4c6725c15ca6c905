"""`odmoe.connect`: the model of an `odmoe serve`, or of another server with the OpenAI API."""

from __future__ import annotations

import math
from typing import Any

import httpx2

from odmoe.api.asking import AnyModel, Query
from odmoe.api.over_http.body import request_of
from odmoe.api.over_http.errors import explained, refused
from odmoe.api.over_http.stream import HttpStream
from scheduler.errors import ConfigError, ProtocolError

CONNECT_S = 10.0
"""Longest time to connect, and to send a request."""
TIMEOUT_S = 600.0


class ServedModel(AnyModel):
    """The model of a server. Each answer has a connection of its own, whose end tells the server to give it up."""

    def __init__(self, url: str, client: httpx2.Client, name: str) -> None:
        super().__init__()
        self.url, self.name = url, name
        self._client = client

    @property
    def _why_closed(self) -> str:
        return f"the connection to {self.url} was closed; call odmoe.connect again"

    def _begin(self, query: Query) -> HttpStream:
        path, body = request_of(query, self.name)
        return HttpStream(self._client, self.url, path, body, query.options.get("logprobs") or 0)

    def _end(self) -> None:
        """Free what this connection holds. The server goes on."""
        self._client.close()


def connect(
    url: str, api_key: str | None = None, *, model: str | None = None, timeout: float = TIMEOUT_S
) -> ServedModel:
    """The model that a server answers with, by its OpenAI API; `odmoe serve` starts one.

    `url`: http://host:port, with or without /v1. `model`: by its name in /v1/models; None: the first. `timeout`:
    longest wait for an answer's first token and for each further one, in seconds.

    Raises LinkError where no server answers, SecretError for a wrong key, ConfigError, DeadlineError.
    """
    root = _root(url)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ConfigError(f"timeout is {timeout!r}; allowed: a number of seconds above 0")
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {_key(api_key)}"} if api_key else {})
    client = httpx2.Client(
        base_url=root,
        headers=headers,
        timeout=httpx2.Timeout(CONNECT_S, read=timeout),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
    )
    try:
        names = _models(client, root)
    except BaseException:
        client.close()
        raise
    if model is not None and model not in names:
        client.close()
        raise ConfigError(f"model is {model!r}; {root} has: {', '.join(names)}")
    return ServedModel(root, client, model or names[0])


def _root(url: str) -> str:
    """The URL without /v1. Raises ConfigError."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"url is {url!r}; allowed: http://host:port or https://host:port, as odmoe serve shows it")
    return str(url).rstrip("/").removesuffix("/v1")


def _key(given: object) -> str:
    """Raises ConfigError, which does not show the key."""
    if isinstance(given, str) and given.isascii() and given.isprintable():
        return given
    raise ConfigError("api_key is not valid (the value is not shown); allowed: a text of printable ASCII characters")


def _models(client: httpx2.Client, url: str) -> list[str]:
    """The names of a server's models."""
    with explained(url):
        answer = client.get("/v1/models", timeout=CONNECT_S)
    if answer.status_code != 200:
        raise refused(url, answer)
    try:
        found: Any = answer.json()
        names = [str(one["id"]) for one in found["data"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ProtocolError(f"{url}/v1/models is not that of a server with the OpenAI API; check the URL") from error
    if not names:
        raise ProtocolError(f"{url} has no model; start it with one")
    return names
