"""Who may ask: with keys, whoever has one; without, programs of this machine, and not the web pages that its browsers
show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from odmoe.serve.api_error import SERVER, ApiError
from odmoe.serve.error_forms import error_object
from odmoe.serve.key_ring import KeyRing
from odmoe.serve.page.static_files import static_files
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.serve_settings import is_loopback

WITHOUT_KEY = ("/health", "/ready", *static_files())
"""Paths that need no key: what watches the process has none, and the page asks for one."""
STATUS = ("/health", "/ready", "/metrics")
"""Paths of what watches the service: they are answered on spare connections too."""
WITHOUT_EFFECT = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that change nothing. A page cannot read their responses, unless it is allowed to."""


class Keys:
    """Refuses requests without one of the keys, as `Authorization: Bearer KEY` or, as Anthropic's clients send it,
    `x-api-key: KEY`, and those beyond a key's limits. `on_refused`: called with the error's code."""

    def __init__(self, app: ASGIApp, keys: KeyRing, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._on_refused = on_refused
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in WITHOUT_KEY:
            await self._app(scope, receive, send)
            return
        key = self._key_of(Headers(scope=scope))
        if key is None:
            error = ApiError(
                401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
            await _refuse(error, self._on_refused, scope, receive, send)
            return
        scope["state"]["record"].key = key.name
        if scope["method"] in WITHOUT_EFFECT:
            await self._app(scope, receive, send)
            return
        with ExitStack() as while_answered:
            try:
                while_answered.enter_context(self._keys.using(key))
            except ApiError as error:
                await _refuse(error, self._on_refused, scope, receive, send)
                return

            async def send_and_free(message: Message) -> None:
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    while_answered.close()  # reports may come later

            await self._app(scope, receive, send_and_free)

    def _key_of(self, headers: Headers) -> ApiKey | None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        found = [self._keys.find(given.strip().encode("utf-8", "surrogateescape")) for given in sent]
        return next((key for key in found if key is not None), None)


class CsrfGuard:
    """Protects a service without keys from pages in a browser on this machine. A Host that is not loopback is refused,
    against DNS rebinding. An Origin of another host is refused unless it is one of `origins`, against cross-site
    request forgery (CSRF)."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], on_refused: Callable[[str], None]) -> None:
        """`on_refused`: called with the error's code."""
        self._app, self._origins, self._on_refused = app, origins, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._fault(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        await _refuse(error, self._on_refused, scope, receive, send)

    def _fault(self, method: str, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_loopback(_name(host)):
            text = f"the Host {host!r} is not served without a key; ask 127.0.0.1 or localhost, or start it with a key"
            return ApiError(403, text, code="foreign_host")
        if origin is None or method in WITHOUT_EFFECT or origin == f"http://{host}":
            return None
        if origin in self._origins or "*" in self._origins:
            return None
        text = f"pages of {origin!r} may not ask without a key; start it with --cors-origin {origin}, or with a key"
        return ApiError(403, text, code="foreign_origin")


class Crowded:
    """Refuses requests of connections for which there was no place, but those about the service itself. `on_refused`:
    called with the error's code."""

    def __init__(self, app: ASGIApp, on_refused: Callable[[str], None]) -> None:
        self._app, self._on_refused = app, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get("connection")
        if connection is None or not connection.spare or scope["path"] in STATUS:
            await self._app(scope, receive, send)
            return
        text = "as many connections as there are places for are busy; try again later"
        error = ApiError(503, text, SERVER, code="too_many_connections")
        await _refuse(error, self._on_refused, scope, receive, send, {"Connection": "close"})


def _name(host: str) -> str:
    """Of a Host header, without the port. Empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _refuse(
    error: ApiError,
    on_refused: Callable[[str], None],
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Mapping[str, str] | None = None,
) -> None:
    scope["state"]["record"].finish = error.code
    on_refused(error.code or error.kind)
    body = error_object(error, scope["path"], scope["state"]["record"].id)
    await error.response(headers, body)(scope, receive, send)
